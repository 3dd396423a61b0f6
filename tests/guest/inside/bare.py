"""Queue pairs and ports through pyverbs, without the engine."""

from __future__ import annotations

import time
from types import SimpleNamespace

from r2serve.topo.verbs import pyverbs_device

PORT, GID_INDEX = 1, 1
BYTES = 64


def _pyverbs() -> SimpleNamespace:
    assert pyverbs_device() is not None, "no pyverbs: deploy/setup/system.sh guest"
    from pyverbs import addr, cq, device, enums, mr, pd, qp, wr  # type: ignore[import-not-found]

    return SimpleNamespace(addr=addr, cq=cq, device=device, enums=enums, mr=mr, pd=pd, qp=qp, wr=wr)


def port_is_active(device: str) -> bool:
    """Returns whether the device reports its port as active."""
    verbs = _pyverbs()
    with verbs.device.Context(name=device) as context:
        return bool(context.query_port(PORT).state == verbs.enums.IBV_PORT_ACTIVE)


class BareQueuePair:
    """An RC queue pair for writes into its peer's memory."""

    def __init__(self, device: str) -> None:
        self._verbs = verbs = _pyverbs()
        enums = verbs.enums
        self._access = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE
        self._context = verbs.device.Context(name=device)
        domain = verbs.pd.PD(self._context)
        self._completions = verbs.cq.CQ(self._context, 16)
        self._memory = verbs.mr.MR(domain, BYTES, self._access)
        self._queue_pair = verbs.qp.QP(
            domain,
            verbs.qp.QPInitAttr(
                qp_type=enums.IBV_QPT_RC,
                scq=self._completions,
                rcq=self._completions,
                cap=verbs.qp.QPCap(max_send_wr=8, max_recv_wr=8),
            ),
        )

    def connect(self, peer: BareQueuePair, timeout: int, retry_cnt: int) -> None:
        """Connects this end; the peer needs the same call."""
        verbs = self._verbs
        attributes = verbs.qp.QPAttr(port_num=PORT)
        attributes.qp_access_flags = self._access
        attributes.dest_qp_num = peer._queue_pair.qp_num
        attributes.path_mtu = verbs.enums.IBV_MTU_1024
        attributes.max_dest_rd_atomic = attributes.max_rd_atomic = 1
        attributes.min_rnr_timer = 12
        attributes.ah_attr = verbs.addr.AHAttr(
            gr=verbs.addr.GlobalRoute(
                dgid=peer._context.query_gid(port_num=PORT, index=GID_INDEX),
                sgid_index=GID_INDEX,
                hop_limit=64,
            ),
            is_global=1,
            port_num=PORT,
        )
        attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = timeout, retry_cnt, 7
        self._queue_pair.to_rts(attributes)

    def write(self, peer: BareQueuePair) -> tuple[str, float]:
        """Sends an RDMA WRITE. Returns the status of its completion and the delay in seconds."""
        verbs = self._verbs
        request = verbs.wr.SendWR(
            wr_id=1,
            num_sge=1,
            sg=[verbs.wr.SGE(self._memory.buf, BYTES, self._memory.lkey)],
            opcode=verbs.enums.IBV_WR_RDMA_WRITE,
            send_flags=verbs.enums.IBV_SEND_SIGNALED,
        )
        request.set_wr_rdma(peer._memory.rkey, peer._memory.buf)
        began = time.monotonic()
        self._queue_pair.post_send(request)
        while time.monotonic() < began + 60:
            count, completions = self._completions.poll(1)
            if count:
                seconds = time.monotonic() - began
                return verbs.enums.ibv_wc_status(completions[0].status).name, seconds
        raise AssertionError("no completion within 60 s")


def connected_pair(timeout: int, retry_cnt: int) -> tuple[BareQueuePair, BareQueuePair]:
    """Connects NIC 0 of node 0 with NIC 0 of node 1, and checks the connection with a write."""
    near, far = (BareQueuePair(f"rxe_n{node}r0") for node in range(2))
    near.connect(far, timeout, retry_cnt)
    far.connect(near, timeout, retry_cnt)
    status, _ = near.write(far)
    assert status == "IBV_WC_SUCCESS"
    return near, far
