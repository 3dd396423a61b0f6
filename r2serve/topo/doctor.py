"""What would keep rails from working on this node, and how to mend it."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r2serve.config import Config
from r2serve.topo import pci, verbs
from r2serve.topo.node import Nic, Node

OK, NOTE, WARNING, FAILURE = "ok", "note", "warning", "failure"

_ROCE_HEADERS = 100
"""Bytes of a RoCE v2 packet beside its payload, rounded up: IPv6, UDP, transport, checksums."""


@dataclass(frozen=True)
class Finding:
    level: str
    """``failure``: a rail cannot work; ``warning``: it may not, or not well."""
    check: str
    text: str
    fix: str = ""


@dataclass(frozen=True)
class Patient:
    """What the checks look at; tests make their own."""

    node: Node
    config: Config
    memlock_bytes: int
    """-1: no limit."""
    uverbs: tuple[Path, ...]
    modules: frozenset[str]
    nft: Any
    """What ``nft -j list ruleset`` says; None: it cannot be asked."""
    pfc: Callable[[str], str]
    """What ``dcb pfc show`` says of an interface; empty: it cannot be asked."""
    arp_ignore: Callable[[str], int]


Check = Callable[[Patient], Iterable[Finding]]


def examine(node: Node, config: Config) -> list[Finding]:
    """All findings about this machine, the worst first."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    patient = Patient(
        node=node,
        config=config,
        memlock_bytes=-1 if soft == resource.RLIM_INFINITY or _may_lock_anything() else soft,
        uverbs=tuple(sorted(Path("/dev/infiniband").glob("uverbs*"))),
        modules=frozenset(path.name for path in Path("/sys/module").glob("*")),
        nft=_nft(),
        pfc=lambda nic: _output("dcb", "pfc", "show", "dev", nic),
        arp_ignore=lambda nic: _sysctl(nic, "arp_ignore"),
    )
    return judge(patient)


def judge(patient: Patient) -> list[Finding]:
    """The findings of every check; one that found nothing to say is ``ok``."""
    worst = [FAILURE, WARNING, NOTE, OK]
    found = []
    for name, check in CHECKS.items():
        own = list(check(patient))
        found += own or [Finding(OK, name, "nothing found")]
    return sorted(found, key=lambda finding: worst.index(finding.level))


# ---- the checks ---------------------------------------------------------------------------------


def _rails(patient: Patient) -> list[Nic]:
    return [nic for nic in patient.node.nics if nic.rail]


def _verbs_rails(patient: Patient) -> list[Nic]:
    return [nic for nic in _rails(patient) if nic.kind == "verbs"]


def rails_exist(patient: Patient) -> Iterator[Finding]:
    rails = _rails(patient)
    if not rails:
        why = "; ".join(f"{nic.name}: {nic.why_not}" for nic in patient.node.nics) or "no NIC"
        yield Finding(
            FAILURE, "rails", f"no rail: {why}", "name devices or addresses in R2CCL_RAILS"
        )
    elif len(rails) == 1:
        yield Finding(
            WARNING,
            "rails",
            f"{rails[0].name} is the only rail: nothing to fail over to but the management NIC",
            "give the node a second NIC, or name it in R2CCL_RAILS",
        )


def links_are_up(patient: Patient) -> Iterator[Finding]:
    for nic in _rails(patient):
        if not nic.up:
            yield Finding(FAILURE, "link", f"{nic.name} is down", f"ip link set {nic.name} up")
        elif not nic.carrier:
            yield Finding(
                FAILURE, "link", f"{nic.name} has no carrier", "look at its cable and switch port"
            )
        elif nic.rdma and nic.rdma_state != "ACTIVE":
            yield Finding(
                FAILURE,
                "link",
                f"{nic.rdma} of {nic.name} is {nic.rdma_state}",
                "InfiniBand: is a subnet manager running? RoCE: is the interface up?",
            )


def library_loads(patient: Patient) -> Iterator[Finding]:
    needed = [nic.rdma for nic in patient.node.nics if nic.rdma]
    if patient.node.libibverbs == "ok" or not (needed or patient.config.rdma == "require"):
        return
    yield Finding(
        FAILURE if patient.config.rdma == "require" else WARNING,
        "libibverbs",
        f"{patient.node.libibverbs}; without it {', '.join(needed) or 'rails'} cannot carry verbs",
        "install it: libibverbs1 and ibverbs-providers (Debian, Ubuntu), libibverbs (RHEL)",
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
            "there are RDMA devices and no /dev/infiniband/uverbs*",
            "modprobe ib_uverbs; in a container: pass /dev/infiniband in",
        )
    for path in patient.uverbs:
        if not os.access(path, os.R_OK | os.W_OK):
            yield Finding(
                FAILURE,
                "permission",
                f"{path} cannot be opened",
                "run with access to it (group rdma, or the container's device list)",
            )


def memory_may_be_locked(patient: Patient) -> Iterator[Finding]:
    config = patient.config
    # Slots and staging of one communicator with one peer, and the rings of each rail.
    slots = config.slots + config.spare_slots
    wanted = slots * (config.slot_bytes + min(config.staging_bytes, config.slot_bytes))
    wanted += len(_verbs_rails(patient)) * (1024**2 + 8 * config.chunk_bytes)
    if (
        not _verbs_rails(patient)
        or patient.memlock_bytes < 0
        or patient.memlock_bytes >= 8 * wanted
    ):
        return
    yield Finding(
        FAILURE if patient.memlock_bytes < wanted else WARNING,
        "memlock limit",
        f"{patient.memlock_bytes} bytes may be locked; a communicator takes {wanted} for each peer",
        "ulimit -l unlimited (limits.conf: memlock; systemd: LimitMEMLOCK=infinity; "
        "Kubernetes: the runtime's default limits)",
    )


def gids_exist(patient: Patient) -> Iterator[Finding]:
    for nic in _verbs_rails(patient):
        if not nic.gid:
            chosen = patient.config.gid_index
            where = f" at index {chosen} (R2CCL_GID_INDEX)" if chosen >= 0 else ""
            yield Finding(
                FAILURE,
                "GID",
                f"{nic.rdma} has no GID{where}",
                "RoCE: give its interface an address; or set R2CCL_GID_INDEX to one that "
                "`show_gids` lists",
            )
        elif "RoCE v1" in nic.gid:
            yield Finding(
                WARNING,
                "GID",
                f"{nic.rdma} uses {nic.gid}, which no router forwards",
                "prefer RoCE v2: R2CCL_GID_INDEX",
            )
        elif nic.addresses and not any(address in nic.gid for address in nic.addresses):
            yield Finding(
                NOTE, "GID", f"{nic.rdma} uses {nic.gid}, which is no address of {nic.name}"
            )


def mtus_agree(patient: Patient) -> Iterator[Finding]:
    rails = _rails(patient)
    if len({nic.mtu for nic in rails}) > 1:
        yield Finding(
            WARNING,
            "MTU",
            "rails differ: " + ", ".join(f"{nic.name} {nic.mtu}" for nic in rails),
            "set them alike, on the peers and on the switches too",
        )
    for nic in _verbs_rails(patient):
        active = (nic.verbs or {}).get("active_mtu", 0)
        most = (nic.verbs or {}).get("max_mtu", 0)
        if active and active < most:
            yield Finding(
                WARNING,
                "MTU",
                f"{nic.rdma} sends packets of {active} bytes and could send {most}",
                f"ip link set {nic.name} mtu {most + _ROCE_HEADERS} or more, all along the path",
            )


def nics_answer_for_themselves(patient: Patient) -> Iterator[Finding]:
    """Of several NICs in one network Linux answers ARP with any."""
    by_network: dict[str, list[Nic]] = defaultdict(list)
    for nic in _rails(patient):
        if nic.network:
            by_network[nic.network].append(nic)
    for network, nics in by_network.items():
        loose = [nic.name for nic in nics if patient.arp_ignore(nic.name) == 0]
        if len(nics) > 1 and loose:
            yield Finding(
                WARNING,
                "ARP",
                f"{', '.join(nic.name for nic in nics)} are all in {network}, and "
                f"{', '.join(loose)} answer for each other: a rail may run over another's NIC",
                "sysctl net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2, or a "
                "network for each rail",
            )


def gpus_have_buffers(patient: Patient) -> Iterator[Finding]:
    node = patient.node
    if pci.gpus() and not node.gpus:
        yield Finding(
            WARNING,
            "GPU",
            f"there are GPUs, and the driver shows none: {node.cuda}",
            "install NVIDIA's driver, or name its library in R2CCL_CUDA_LIBRARY",
        )
    for gpu in node.gpus:
        if not gpu.buffers:
            yield Finding(
                WARNING,
                "GPU",
                f"gpu{gpu.index} ({gpu.name}) cannot be used: {gpu.why_not}",
                "install r2serve again where nvcc is in PATH" if "nvcc" in gpu.why_not else "",
            )
        else:
            yield Finding(
                NOTE,
                "GPU",
                f"gpu{gpu.index} ({gpu.name}): buffers are in {gpu.buffers}; {gpu.why_not}"
                + (", though this GPU could (dma-buf)" if gpu.dma_buf else ""),
            )


def flow_control_is_known(patient: Patient) -> Iterator[Finding]:
    for nic in _verbs_rails(patient):
        if not nic.gid or "RoCE" not in nic.gid:
            continue
        told = patient.pfc(nic.name)
        if "on" not in told.split():
            known = "is off" if told else "is not known"
            yield Finding(
                NOTE,
                "PFC",
                f"priority flow control of {nic.name} {known}; RoCE loses packets without it, "
                "which costs time and no data",
                f"dcb pfc show dev {nic.name}; then R2CCL_TRAFFIC_CLASS and R2CCL_SERVICE_LEVEL to "
                "match it",
            )


def firewall_is_open(patient: Patient) -> Iterator[Finding]:
    for entry in (patient.nft or {}).get("nftables", []):
        chain = entry.get("chain", {})
        if chain.get("hook") != "input" or chain.get("policy") != "drop":
            continue
        yield Finding(
            WARNING,
            "firewall",
            f"chain {chain.get('table')}/{chain.get('name')} drops what no rule accepts",
            "accept TCP from the other nodes on the rails' NICs, and UDP port 4791 for RoCE v2",
        )


def pyverbs_is_here(patient: Patient) -> Iterator[Finding]:
    if any(nic.rdma for nic in patient.node.nics) and verbs.pyverbs_device() is None:
        yield Finding(
            NOTE,
            "pyverbs",
            "not installed: firmware and MTU of devices are not shown. Serving does not need it",
            "apt-get install python3-pyverbs, or pip install 'r2serve[rdma]'",
        )


CHECKS: dict[str, Check] = {
    "rails": rails_exist,
    "link": links_are_up,
    "libibverbs": library_loads,
    "kernel module": kernel_modules,
    "memlock limit": memory_may_be_locked,
    "GID": gids_exist,
    "MTU": mtus_agree,
    "ARP": nics_answer_for_themselves,
    "GPU": gpus_have_buffers,
    "PFC": flow_control_is_known,
    "firewall": firewall_is_open,
    "pyverbs": pyverbs_is_here,
}


# ---- asking the system --------------------------------------------------------------------------


def _may_lock_anything() -> bool:
    """The limit does not hold for whoever has CAP_IPC_LOCK, as root has."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> 14 & 1)
    return False


def _output(*command: str) -> str:
    """What a command says; empty if it is not here or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    return done.stdout if done.returncode == 0 else ""


def _nft() -> Any:
    text = _output("nft", "-j", "list", "ruleset")
    return json.loads(text) if text else None


def _sysctl(nic: str, name: str) -> int:
    """Of an interface; what holds for all of them counts, too."""
    base = Path("/proc/sys/net/ipv4/conf")
    values = []
    for scope in (nic, "all"):
        try:
            values.append(int((base / scope / name).read_text()))
        except OSError:
            continue
    return max(values, default=0)
