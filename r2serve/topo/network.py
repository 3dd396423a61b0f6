"""The doctor's checks of networks: MTU, ARP, PFC, packet filter, and the peer's ports."""

from __future__ import annotations

import ipaddress
import re
from collections import defaultdict
from collections.abc import Iterator

from r2serve.ports import same_network
from r2serve.ports.pairing import unpaired_ports
from r2serve.topo import firewall
from r2serve.topo.checks import FAILURE, NOTE, OK, WARNING, Finding, Patient
from r2serve.topo.firewall import Traffic
from r2serve.topo.peer import pairs
from r2serve.topo.reach import why_never_up

_ROCE_HEADERS = 100
"""Bytes of RoCE v2 headers and checksums in a packet, rounded up: IPv6, UDP, transport."""


def mtus_agree(patient: Patient) -> Iterator[Finding]:
    rails = [nic for nic in patient.rails if not nic.reserve]  # a reserve has a network of its own
    if len({nic.mtu for nic in rails}) > 1:
        yield Finding(
            WARNING,
            "MTU",
            "MTUs of rails differ: " + ", ".join(f"{nic.name} {nic.mtu}" for nic in rails),
            "set the same MTU on all rails, peers and switches",
        )
    for nic in patient.verbs_rails:
        active = (nic.verbs or {}).get("active_mtu", 0)
        most = (nic.verbs or {}).get("max_mtu", 0)
        if active and active < most:
            yield Finding(
                WARNING,
                "MTU",
                f"{nic.rdma} sends packets of {active} bytes; {most} bytes are possible",
                f"ip link set {nic.name} mtu {most + _ROCE_HEADERS} or more, on the whole path",
            )


def nics_answer_for_themselves(patient: Patient) -> Iterator[Finding]:
    """Reports ports in the same network with settings of Linux that mix the ports up."""
    views = [view for end in patient.node.ports for view in end.info().views()]
    networks = [(view.device, view.network) for view in views]
    for text in same_network.problems(networks, patient.setting):
        problem, _, fix = text.partition(". Set ")
        yield Finding(WARNING, "ARP", problem, f"sysctl: set {fix}")


def flow_control_is_known(patient: Patient) -> Iterator[Finding]:
    for nic in patient.verbs_rails:
        if "RoCE" not in nic.gid:
            continue
        told = patient.pfc(nic.name)
        if not _flow_controlled(told):
            known = "is off" if told else "is unknown"
            yield Finding(
                NOTE,
                "PFC",
                f"priority flow control of {nic.name} {known}; without PFC, RoCE loses packets, "
                "which costs time but no data",
                f"dcb pfc show dev {nic.name}; then set R2CCL_TRAFFIC_CLASS and "
                "R2CCL_SERVICE_LEVEL accordingly",
            )


def _flow_controlled(told: str) -> list[str]:
    """Returns the enabled priorities in the line ``prio-pfc 0:off 1:off 2:off 3:on …``."""
    priorities = re.search(r"^prio-pfc((?: \d:(?:on|off))+)", told, re.MULTILINE)
    return re.findall(r"(\d):on", priorities[1]) if priorities else []


def firewall_is_open(patient: Patient) -> Iterator[Finding]:
    rules = patient.rules
    if rules.nft is None:
        yield Finding(
            NOTE,
            "firewall",
            f"rules cannot be read, so drops are unknown: {rules.why_not}",
            "run `r2serve doctor` as root, with nftables installed",
        )
    dropped: dict[tuple[str, bool], list[str]] = defaultdict(list)
    for traffic in _traffic(patient):
        for chain, certain in firewall.dropped(rules, traffic):
            dropped[chain, certain].append(str(traffic))
    fix = (
        "accept TCP from and to the other nodes on the rails' NICs, and UDP port 4791 for "
        f"Soft-RoCE: {_rule(patient)}"
    )
    for (chain, certain), what in dropped.items():
        word, level = ("drops", WARNING) if certain else ("may drop", NOTE)
        yield Finding(level, "firewall", f"chain {chain} {word} {', '.join(what)}", fix)
    legacy, all_of_it = firewall.dropped_by_legacy(rules)
    if legacy:
        level = WARNING if all_of_it else NOTE
        said = "; ".join(legacy)
        yield Finding(level, "firewall", f"iptables-legacy may drop rail traffic: {said}", fix)


def _rule(patient: Patient) -> str:
    nics = list(dict.fromkeys(end.device for end in patient.node.ports))
    return firewall.accepting(patient.rules, nics, patient.rules.ports)


def _traffic(patient: Patient) -> Iterator[Traffic]:
    """Yields traffic subject to the packet filter: TCP and Soft-RoCE; RDMA NICs bypass filters."""
    soft = {nic.name for nic in patient.verbs_rails if nic.soft_rdma and "RoCE v2" in nic.gid}
    views = [view for end in patient.node.ports for view in end.info().views()]
    for end in views:
        if end.waits:
            continue
        own = ipaddress.ip_network(end.address)
        known = end.network and not end.borrowed
        peers = ipaddress.ip_network(end.network) if known else None
        for hook in ("input", "output"):
            yield Traffic(hook, end.device, "tcp", patient.rules.ports, own, peers)
            if end.device in soft:
                yield Traffic(hook, end.device, "udp", (4791, 4791), own, peers)


def peer_fits(patient: Patient) -> Iterator[Finding]:
    """Checks the rails between this node's ports and the peer's ports."""
    if patient.peer is None:
        yield Finding(OK, "peer", "not checked: --peer takes the peer's `r2serve topo --json`")
        return
    host, own = patient.peer.host, patient.node.ports
    if not patient.peer.ports:
        yield Finding(
            FAILURE, "peer", f"{host} has no port for rails", f"run `r2serve doctor` on {host}"
        )
    required = patient.config.rdma == "require"
    here = [end.info() for end in own]
    there = [end.info() for end in patient.peer.ports]
    for text in unpaired_ports(here, there, host).values():
        yield Finding(WARNING, "peer", text, "put both ports into one network, or set a route")
    for pair in pairs(own, patient.peer.ports):
        rail = f"{pair.own} and {pair.other} of {host}"
        why, fix = why_never_up(patient, pair.own, pair.other)
        if why:
            yield Finding(FAILURE, "peer", f"the rail of {rail} will never come up: {why}", fix)
            continue
        verbs_wanted = patient.config.rdma == "auto" and (
            pair.own.verbs_device or pair.other.verbs_device
        )
        if pair.why_tcp and (required or verbs_wanted):
            yield Finding(
                FAILURE if required else WARNING,
                "peer",
                f"the rail of {rail} uses TCP: {pair.why_tcp}",
                "RoCE v1 and v2: R2CCL_GID_INDEX; else put ports of the same kind into one network",
            )
        if _differ(pair.own.mtu, pair.other.mtu):
            yield Finding(
                WARNING,
                "peer",
                f"MTUs of {rail} differ: {pair.own.mtu} and {pair.other.mtu}",
                "set the same MTU, on the switches between the ports, too",
            )
        if _differ(pair.own.network, pair.other.network):
            yield Finding(
                NOTE,
                "peer",
                f"{rail} are in different networks, {pair.own.network} and {pair.other.network}",
                f"check the route between both: ping -I {pair.own.device} {pair.other.address}",
            )


def _differ(one: str | int, other: str | int) -> bool:
    """Whether both values are known and different."""
    return bool(one and other) and one != other
