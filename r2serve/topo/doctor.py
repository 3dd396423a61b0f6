"""Checks of this node for problems that prevent rails from working, with fixes."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from r2serve.config import Config
from r2serve.option import port_window
from r2serve.ports import pci, same_network
from r2serve.topo import firewall, host_name, listening, network, reach, system, verbs
from r2serve.topo.checks import FAILURE, NOTE, OK, WARNING, Check, Finding, Patient
from r2serve.topo.node import NodeReport
from r2serve.topo.peer import Peer


def examine(node: NodeReport, config: Config, other: Peer | None = None) -> list[Finding]:
    """Returns all findings about this node and its rails to ``other``, the worst first."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    patient = Patient(
        node=node,
        config=config,
        memlock_bytes=-1 if soft == resource.RLIM_INFINITY or system.may_lock_anything() else soft,
        uverbs=tuple(sorted(Path("/dev/infiniband").glob("uverbs*"))),
        modules=frozenset(path.name for path in Path("/sys/module").glob("*")),
        rules=firewall.read(port_window(config.ports) if config.ports else None),
        pfc=lambda nic: system.ask("dcb", "pfc", "show", "dev", nic).text,
        setting=same_network.sysctl,
        pyverbs=verbs.pyverbs_state(),
        peer=other,
        free_ports=listening.free_ports,
        kernel_ports=system.local_ports(),
        reserved_ports=system.reserved_ports(),
        route=reach.route,
        host_name=host_name.look(),
    )
    return judge(patient)


def judge(patient: Patient) -> list[Finding]:
    """Returns the findings of every check; a check without findings yields ``ok``."""
    worst = [FAILURE, WARNING, NOTE, OK]
    found = []
    for name, check in CHECKS.items():
        own = list(check(patient))
        found += own or [Finding(OK, name, "nothing found")]
    return sorted(found, key=lambda finding: worst.index(finding.level))


# ---- the checks ----


def rails_exist(patient: Patient) -> Iterator[Finding]:
    rails = patient.rails
    if not rails:
        why = "; ".join(f"{nic.name}: {nic.why_not}" for nic in patient.node.nics) or "no NIC"
        yield Finding(
            FAILURE, "rails", f"no rail: {why}", "name devices or addresses in R2CCL_RAILS"
        )
        return
    for text in patient.node.warnings:
        yield Finding(WARNING, "rails", text, "set R2CCL_RAILS, or R2CCL_MANAGEMENT")
    if len(rails) == 1:
        yield Finding(
            WARNING,
            "rails",
            f"{rails[0].name} is the only rail: nothing to fail over to but the management NIC",
            "give the node a second NIC, or name it in R2CCL_RAILS",
        )


def rails_are_independent(patient: Patient) -> Iterator[Finding]:
    """Reports rails that fail together: on a single physical port or card."""
    units = {nic.unit for nic in patient.rails}
    for text in patient.node.shared:
        alone = len(units) == 1 and "cables of their own" not in text
        yield Finding(
            WARNING if alone else NOTE,
            "shared fate",
            text + (", so nothing is left to fail over to" if alone else ""),
            "add a rail over another port" if alone else "",
        )


def links_are_up(patient: Patient) -> Iterator[Finding]:
    for nic in patient.rails:
        if not nic.up:
            yield Finding(FAILURE, "link", f"{nic.name} is down", f"ip link set {nic.name} up")
        elif not nic.carrier:
            yield Finding(
                FAILURE,
                "link",
                f"{nic.name} has no carrier",
                "check cable, transceiver and switch port",
            )
        elif "verbs" in nic.kind and nic.rdma_state != "ACTIVE":
            yield Finding(
                FAILURE,
                "link",
                f"{nic.rdma} of {nic.name} is {nic.rdma_state}: must be ACTIVE",
                "InfiniBand: is a subnet manager running? RoCE: is the interface up?",
            )


def library_loads(patient: Patient) -> Iterator[Finding]:
    needed = [nic.rdma for nic in patient.node.nics if nic.rdma]
    if patient.node.libibverbs == "ok" or not (needed or patient.config.rdma == "require"):
        return
    yield Finding(
        FAILURE if patient.config.rdma == "require" else WARNING,
        "libibverbs",
        f"{patient.node.libibverbs}; without it {', '.join(needed) or 'rails'} cannot use verbs",
        "install libibverbs-dev (Debian, Ubuntu) or rdma-core-devel (RHEL), then build r2serve "
        "again: pip install --force-reinstall --no-deps . in its checkout"
        if _HEADER in patient.node.libibverbs
        else "install libibverbs1 and ibverbs-providers (Debian, Ubuntu) or libibverbs (RHEL)",
    )


_HEADER = "infiniband/verbs.h"
"""Part of the reason in a build without RDMA; a library installed later does not help."""


def rdma_is_used(patient: Patient) -> Iterator[Finding]:
    """Applies the rule of the engine and of ``topo``: :func:`r2serve.ports.rdma.transport_of`."""
    node, required = patient.node, patient.config.rdma == "require"
    for nic in patient.rails:
        if not nic.why_tcp or not (required or (nic.rdma and patient.config.rdma == "auto")):
            continue
        if node.libibverbs != "ok" and node.libibverbs in nic.why_tcp:
            continue  # the check of the library reports this
        yield Finding(
            FAILURE if required else WARNING,
            "RDMA",
            f"rails of {nic.name} use TCP: {nic.why_tcp}"
            + (", and R2CCL_RDMA is 'require'" if required else ""),
            "RoCE: the rail's address must be a GID of the device; a container needs the "
            "device of its own interface, or R2CCL_GID_INDEX"
            if "GID" in nic.why_tcp
            else "fix the reason above, or set R2CCL_RDMA=auto for TCP",
        )


def kernel_modules(patient: Patient) -> Iterator[Finding]:
    providers = {
        "mlx5_core": "mlx5_ib",
        "mlx4_en": "mlx4_ib",
        "bnxt_en": "bnxt_re",
        "ice": "irdma",
        "i40e": "irdma",
        "qede": "qedr",
        "hns3": "hns_roce",
    }
    for nic in patient.node.nics:
        module = providers.get(nic.driver)
        if module and not nic.rdma and module not in patient.modules:
            yield Finding(
                WARNING,
                "kernel module",
                f"{nic.name} ({nic.driver}) has no RDMA device: {module} is not loaded",
                f"modprobe {module}",
            )
    if any(nic.rdma for nic in patient.node.nics) and not patient.uverbs:
        yield Finding(
            FAILURE,
            "kernel module",
            "RDMA devices exist, but no /dev/infiniband/uverbs*",
            "modprobe ib_uverbs; in a container: pass /dev/infiniband in",
        )
    for path in patient.uverbs:
        if not os.access(path, os.R_OK | os.W_OK):
            yield Finding(
                FAILURE,
                "permission",
                f"{path} cannot be opened for reading and writing",
                "run with access to the device (group rdma, or the container's device list)",
            )


def memory_may_be_locked(patient: Patient) -> Iterator[Finding]:
    config = patient.config
    # A low limit may be the reason why rails use TCP, so RDMA devices count, not verbs rails.
    rails = [nic for nic in patient.rails if nic.rdma]
    # Slots and staging of a communicator with a single peer, and the rings of each rail.
    slots = config.slots + config.spare_slots
    wanted = slots * (config.slot_bytes + min(config.staging_bytes, config.slot_bytes))
    wanted += len(rails) * (1024**2 + 8 * config.chunk_bytes)
    if not rails or patient.memlock_bytes < 0 or patient.memlock_bytes >= 8 * wanted:
        return
    fails = patient.memlock_bytes < wanted and bool(patient.verbs_rails)
    yield Finding(
        FAILURE if fails else WARNING,
        "memlock limit",
        f"{patient.memlock_bytes} bytes may be locked; a communicator needs {wanted} bytes a peer",
        "ulimit -l unlimited (limits.conf: memlock; systemd: LimitMEMLOCK=infinity; "
        "Kubernetes: the default limits of the container runtime)",
    )


def gids_are_right(patient: Patient) -> Iterator[Finding]:
    for nic in patient.verbs_rails:
        if "RoCE v1" in nic.gid:
            yield Finding(
                WARNING,
                "GID",
                f"{nic.rdma} uses {nic.gid}, not routable",
                "use RoCE v2: R2CCL_GID_INDEX",
            )
        elif "RoCE" in nic.gid and not any(f" {own})" in nic.gid for own in nic.addresses):
            yield Finding(NOTE, "GID", f"{nic.rdma} uses {nic.gid}, not an address of {nic.name}")


def gpus_have_buffers(patient: Patient) -> Iterator[Finding]:
    node = patient.node
    if pci.gpus() and not node.gpus:
        yield Finding(
            WARNING,
            "GPU",
            f"GPUs exist, but the driver shows none: {node.cuda}",
            "install NVIDIA's driver, or set R2CCL_CUDA_LIBRARY to the driver's library",
        )
    for gpu in node.gpus:
        if not gpu.buffers:
            yield Finding(
                WARNING,
                "GPU",
                f"gpu{gpu.index} ({gpu.name}) cannot be used: {gpu.why_not}",
                "install r2serve again with nvcc in PATH" if "nvcc" in gpu.why_not else "",
            )
        else:
            yield Finding(
                NOTE,
                "GPU",
                f"gpu{gpu.index} ({gpu.name}): buffers are in {gpu.buffers}"
                + (f"; {gpu.why_not}" if gpu.why_not else ""),
                next((fix for sign, fix in _DIRECT_FIXES.items() if sign in gpu.why_not), ""),
            )


_DIRECT_FIXES = {
    "whose driver takes none": "the NIC's driver must support dma-bufs (mlx5: Linux 5.12 or later)",
    "rdma-core 34": "install rdma-core 34 or later",
    "no memory out as a dma-buf": "NVIDIA's open kernel modules (driver 515 or later, Linux 5.12 "
    "or later) export memory as dma-bufs; nvidia_peermem is not used",
    "R2CCL_CHECKSUM": "unset R2CCL_CHECKSUM, unless bit errors on the path are a concern",
}
"""Fixes by a part of the reason why buffers are not in GPU memory; the first match counts."""


def pyverbs_works(patient: Patient) -> Iterator[Finding]:
    nics = [nic for nic in patient.node.nics if nic.rdma]
    if nics and patient.pyverbs != "ok":
        yield Finding(
            NOTE,
            "pyverbs",
            f"cannot be loaded: {patient.pyverbs}. Firmware and MTU of devices are not shown; "
            "serving works without pyverbs",
            "apt-get install python3-pyverbs, for the distribution's own Python. PyPI's pyverbs "
            "needs Cython before 3.1 and the headers of rdma-core for compilation, and works only "
            "with the rdma-core of the same version",
        )
    for nic in nics:
        if error := (nic.verbs or {}).get("error"):
            yield Finding(
                WARNING,
                "pyverbs",
                f"{nic.rdma} cannot be queried: {error}",
                f"try `ibv_devinfo -d {nic.rdma.partition(':')[0]}`, and see the other findings",
            )


CHECKS: dict[str, Check] = {
    "rails": rails_exist,
    "shared fate": rails_are_independent,
    "host name": host_name.name_is_reachable,
    "link": links_are_up,
    "libibverbs": library_loads,
    "RDMA": rdma_is_used,
    "kernel module": kernel_modules,
    "memlock limit": memory_may_be_locked,
    "GID": gids_are_right,
    "MTU": network.mtus_agree,
    "ARP": network.nics_answer_for_themselves,
    "GPU": gpus_have_buffers,
    "PFC": network.flow_control_is_known,
    "firewall": network.firewall_is_open,
    "ports": listening.ports_suffice,
    "pyverbs": pyverbs_works,
    "peer": network.peer_fits,
}
