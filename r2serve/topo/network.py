"""The doctor's checks of networks: MTU, ARP, flow control, the packet filter, the peer's ports."""

from __future__ import annotations

import ipaddress
import re
from collections import defaultdict
from collections.abc import Iterator

from r2serve.topo import firewall
from r2serve.topo.checks import FAILURE, NOTE, OK, WARNING, Finding, Patient
from r2serve.topo.firewall import Traffic
from r2serve.topo.node import Nic
from r2serve.topo.peer import pairs

_ROCE_HEADERS = 100
"""Bytes of a RoCE v2 packet beside its payload, rounded up: IPv6, UDP, transport, checksums."""


def mtus_agree(patient: Patient) -> Iterator[Finding]:
    rails = patient.rails
    if len({nic.mtu for nic in rails}) > 1:
        yield Finding(
            WARNING,
            "MTU",
            "rails differ: " + ", ".join(f"{nic.name} {nic.mtu}" for nic in rails),
            "set them alike, on the peers and on the switches too",
        )
    for nic in patient.verbs_rails:
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
    for nic in patient.rails:
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


def flow_control_is_known(patient: Patient) -> Iterator[Finding]:
    for nic in patient.verbs_rails:
        if "RoCE" not in nic.gid:
            continue
        told = patient.pfc(nic.name)
        if not _flow_controlled(told):
            known = "is off" if told else "is not known"
            yield Finding(
                NOTE,
                "PFC",
                f"priority flow control of {nic.name} {known}; RoCE loses packets without it, "
                "which costs time and no data",
                f"dcb pfc show dev {nic.name}; then R2CCL_TRAFFIC_CLASS and R2CCL_SERVICE_LEVEL to "
                "match it",
            )


def _flow_controlled(told: str) -> list[str]:
    """The priorities that are on in the line ``prio-pfc 0:off 1:off 2:off 3:on …``."""
    priorities = re.search(r"^prio-pfc((?: \d:(?:on|off))+)", told, re.MULTILINE)
    return re.findall(r"(\d):on", priorities[1]) if priorities else []


def firewall_is_open(patient: Patient) -> Iterator[Finding]:
    rules = patient.rules
    if rules.nft is None:
        yield Finding(
            NOTE,
            "firewall",
            f"its rules cannot be read, so nothing is known of them: {rules.why_not}",
            "run `r2serve doctor` as root, with nftables installed",
        )
    dropped: dict[tuple[str, bool], list[str]] = defaultdict(list)
    for traffic in _traffic(patient):
        for chain, certain in firewall.dropped(rules, traffic):
            dropped[chain, certain].append(str(traffic))
    fix = (
        "accept TCP from and to the other nodes on the rails' NICs, and UDP port 4791 for Soft-RoCE"
    )
    for (chain, certain), what in dropped.items():
        word, level = ("drops", WARNING) if certain else ("may drop", NOTE)
        yield Finding(level, "firewall", f"chain {chain} {word} {', '.join(what)}", fix)
    legacy, all_of_it = firewall.dropped_by_legacy(rules)
    if legacy:
        level = WARNING if all_of_it else NOTE
        said = "; ".join(legacy)
        yield Finding(level, "firewall", f"iptables-legacy may drop what rails need: {said}", fix)


def _traffic(patient: Patient) -> Iterator[Traffic]:
    """RDMA NICs ask no packet filter; Soft-RoCE does."""
    soft = {nic.name for nic in patient.verbs_rails if nic.soft_rdma and "RoCE v2" in nic.gid}
    for end in patient.node.ports:
        own = ipaddress.ip_network(end.address)
        peers = ipaddress.ip_network(end.network) if end.network else None
        for hook in ("input", "output"):
            yield Traffic(hook, end.device, "tcp", patient.rules.ports, own, peers)
            if end.device in soft:
                yield Traffic(hook, end.device, "udp", (4791, 4791), own, peers)


def peer_fits(patient: Patient) -> Iterator[Finding]:
    """Its ports and ours, as they would make rails."""
    if patient.peer is None:
        yield Finding(OK, "peer", "not looked at: --peer takes its `r2serve topo --json`")
        return
    host, own = patient.peer.host, patient.node.ports
    if not patient.peer.ports:
        yield Finding(
            FAILURE, "peer", f"{host} has no port for rails", f"see `r2serve doctor` on {host}"
        )
    required = patient.config.rdma == "require"
    for pair in pairs(own, patient.peer.ports):
        rail = f"{pair.own} and {pair.other} of {host}"
        verbs_wanted = patient.config.rdma == "auto" and (
            pair.own.verbs_device or pair.other.verbs_device
        )
        if pair.why_tcp and (required or verbs_wanted):
            yield Finding(
                FAILURE if required else WARNING,
                "peer",
                f"the rail of {rail} goes over TCP: {pair.why_tcp}",
                "RoCE v1 and v2: R2CCL_GID_INDEX; else put ports of one kind into one network",
            )
        if _differ(pair.own.mtu, pair.other.mtu):
            yield Finding(
                WARNING,
                "peer",
                f"MTUs of {rail} differ: {pair.own.mtu} and {pair.other.mtu}",
                "set them alike, on the switches between them too",
            )
        if _differ(pair.own.network, pair.other.network):
            yield Finding(
                NOTE,
                "peer",
                f"{rail} are in different networks, {pair.own.network} and {pair.other.network}",
                f"see that a router joins them: ping -I {pair.own.device} {pair.other.address}",
            )


def _differ(one: str | int, other: str | int) -> bool:
    """Both are known, and not the same."""
    return bool(one and other) and one != other
