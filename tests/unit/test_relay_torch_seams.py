"""Listeners of torch at a virtual address: gloo and TCPStore, with SYNC before a port is told."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from r2serve import _core
from r2serve.relay import torch_seams
from r2serve.relay.client import Carried, PortTakenError

LONG = timedelta(seconds=60)


class Answering:
    """A relay that answers SYNC."""

    def __init__(self, carried: Carried) -> None:
        self.carried = carried
        self.answers: list[bytes] = []
        """The next answers; then "ok"."""
        self.count = 0
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind("\0" + _core.sync_socket_name(carried.prefix, carried.node))
        self._socket.listen(64)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.count += 1
            with connection:
                connection.sendall(self.answers.pop(0) if self.answers else b"ok\n")

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


@pytest.fixture
def relay(monkeypatch: pytest.MonkeyPatch) -> Iterator[Answering]:
    number = secrets.randbelow(200) + 20
    made = Answering(Carried(f"127.{number}.{secrets.randbelow(256)}.0", 1))
    for name in torch_seams.USERS:
        module = torch_seams._module(name)
        for symbol in (torch_seams.STORE, torch_seams.GLOO):
            if hasattr(module, symbol):
                monkeypatch.setattr(module, symbol, getattr(module, symbol))
    torch_seams.apply(made.carried)
    yield made
    made.close()


def listening() -> set[str]:
    """Returns the addresses of this process's listeners."""
    return {
        one.laddr.ip
        for one in psutil.Process().net_connections("tcp")
        if one.status == psutil.CONN_LISTEN
    }


def test_a_later_relay_replaces_the_classes_of_an_earlier_one(relay: Answering) -> None:
    store, gloo = dist.TCPStore, distributed_c10d.ProcessGroupGloo
    torch_seams.apply(relay.carried)
    assert (dist.TCPStore, distributed_c10d.ProcessGroupGloo) == (store, gloo)
    later = Carried("127.9.9.0", 0)
    torch_seams.apply(later)
    for ours in (dist.TCPStore, distributed_c10d.ProcessGroupGloo):
        assert ours.r2serve_carried == later
        assert not hasattr(ours.r2serve_real, "r2serve_real")
    torch_seams.withdraw()
    assert (dist.TCPStore, distributed_c10d.ProcessGroupGloo) == (
        store.r2serve_real,
        gloo.r2serve_real,
    )


def test_stores_of_a_process_share_a_server(relay: Answering) -> None:
    def master(port: int) -> dist.TCPStore:
        return dist.TCPStore(
            relay.carried.address, port, 1, True, LONG, wait_for_workers=False, multi_tenant=True
        )

    first = master(0)
    second = master(first.port)
    first.set("key", "value")
    assert second.get("key") == b"value"
    with pytest.raises(OSError, match="in use"):
        dist.TCPStore(relay.carried.address, first.port, 1, True, LONG, wait_for_workers=False)


def test_a_store_listens_at_the_virtual_address_alone(relay: Answering) -> None:
    store = dist.TCPStore(relay.carried.address, 0, 2, True, LONG, wait_for_workers=False)
    assert relay.count == 1
    assert relay.carried.address in listening()
    with socket.socket() as other:  # at every address the store would hold the port there, too
        other.bind(("127.0.0.1", store.port))
    client = dist.TCPStore(relay.carried.address, store.port, 2, False, LONG)
    client.set("key", "value")
    assert store.get("key") == b"value"
    assert relay.count == 1, "only a master listens"


def test_rendezvous_by_address_uses_the_virtual_address(relay: Answering) -> None:
    rendezvous = torch_seams._module("torch.distributed.rendezvous")
    with socket.create_server((relay.carried.address, 0)) as free:
        port = free.getsockname()[1]
    url = f"tcp://{relay.carried.address}:{port}"
    store, rank, size = next(rendezvous.rendezvous(url, 0, 1, timeout=LONG))
    assert (rank, size, store.port) == (0, 1, port)
    assert relay.count == 1


def test_a_store_elsewhere_is_torchs(relay: Answering) -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, True, LONG, wait_for_workers=False)
    assert store.port
    assert relay.count == 0


def test_another_node_cannot_be_the_master_here(relay: Answering) -> None:
    with pytest.raises(RuntimeError, match="the virtual address of another node"):
        dist.TCPStore(relay.carried.address_of(0), 0, 2, True, LONG)


def test_a_taken_port_is_replaced_unless_the_port_is_given(relay: Answering) -> None:
    taken = b"taken 4711 node 0\n"
    relay.answers = [taken]
    dist.TCPStore(relay.carried.address, 0, 1, True, LONG, wait_for_workers=False)
    assert relay.count == 2
    relay.answers = [taken]
    with socket.create_server((relay.carried.address, 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(PortTakenError, match="port 4711 on node 0 is taken"):
        dist.TCPStore(relay.carried.address, port, 1, True, LONG, wait_for_workers=False)


def group(rank: int, size: int, store: Any) -> Any:
    return distributed_c10d.ProcessGroupGloo(store, rank, size, timeout=LONG)


def test_gloo_listens_at_the_virtual_address_after_sync(relay: Answering) -> None:
    relay.answers = [b"taken 4711 node 0\n"]
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: group(rank, 2, store), range(2)))
        assert relay.count == 3  # a device of one rank was made twice
        assert relay.carried.address in listening()
        tensors = [torch.full((4,), float(rank + 1)) for rank in range(2)]
        sums = pool.map(lambda made, tensor: made.allreduce([tensor]), groups, tensors)
        for work in sums:
            work.wait()
    assert all(tensor.tolist() == [3.0] * 4 for tensor in tensors)


def test_a_group_of_one_rank_needs_no_mirror(relay: Answering) -> None:
    group(0, 1, dist.HashStore())
    assert relay.count == 0


def test_the_classes_stand_for_torchs(relay: Answering) -> None:
    ours = distributed_c10d.ProcessGroupGloo
    real = ours.r2serve_real
    made = group(0, 1, dist.HashStore())
    assert isinstance(made, real)
    assert isinstance(real(dist.HashStore(), 0, 1, LONG), ours)
    assert ours.__name__ == real.__name__
    torch_seams.apply(relay.carried)
    assert distributed_c10d.ProcessGroupGloo is ours
    assert dist.TCPStore is torch_seams._module("torch.distributed.rendezvous").TCPStore


def test_a_relay_that_is_gone_is_an_error(relay: Answering) -> None:
    relay.answers = [b""]
    with pytest.raises(ConnectionResetError, match="the relay refused SYNC, or ended"):
        group(0, 2, dist.HashStore())
