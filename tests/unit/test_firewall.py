"""The doctor's evaluation of the packet filter's rules, from `nft -j list ruleset` 1.0.6."""

from __future__ import annotations

import dataclasses
import ipaddress
from typing import Any

import pytest
from patients import end, findings, nic, patient

from r2serve.topo import firewall, system
from r2serve.topo.firewall import Rules, Traffic
from r2serve.topo.system import CommandOutput

Rule = list[dict[str, Any]]
ACCEPT: dict[str, Any] = {"accept": None}
DROP: dict[str, Any] = {"drop": None}
REJECT: dict[str, Any] = {"reject": {"type": "icmpx", "expr": "admin-prohibited"}}
COUNTER: dict[str, Any] = {"counter": {"packets": 0, "bytes": 0}}


def base(*rules: Rule, policy: str = "accept", hook: str = "input", **more: Rule) -> Rules:
    """Returns a table with a base chain `in` and other chains of one rule each."""
    where = {"family": "inet", "table": "t"}
    chain = {**where, "name": "in", "type": "filter", "hook": hook, "prio": 0, "policy": policy}
    entries: list[dict[str, Any]] = [{"metainfo": {"json_schema_version": 1}}, {"chain": chain}]
    entries += [{"chain": {**where, "name": name}} for name in more]
    entries += [{"rule": {**where, "chain": "in", "expr": rule}} for rule in rules]
    entries += [{"rule": {**where, "chain": name, "expr": rule}} for name, rule in more.items()]
    banned = {"name": "banned", "type": "ipv4_addr", "elem": ["203.0.113.9"]}
    entries += [{"set": {**where, **banned}}, {"set": {**where, "name": "empty"}}]
    return Rules(tuple(entries))


def match(left: dict[str, Any], right: Any, op: str = "==") -> dict[str, Any]:
    return {"match": {"op": op, "left": left, "right": right}}


def meta(key: str, right: Any, op: str = "==") -> dict[str, Any]:
    return match({"meta": {"key": key}}, right, op)


def payload(protocol: str, field: str, right: Any, op: str = "==") -> dict[str, Any]:
    return match({"payload": {"protocol": protocol, "field": field}}, right, op)


def state(*names: str) -> dict[str, Any]:
    return match({"ct": {"key": "state"}}, {"set": list(names)})


def jump(target: str, how: str = "jump") -> dict[str, Any]:
    return {how: {"target": target}}


def by_nic(**verdicts: dict[str, Any]) -> dict[str, Any]:
    data = {"set": [[name, verdict] for name, verdict in verdicts.items()]}
    return {"vmap": {"key": {"meta": {"key": "iifname"}}, "data": data}}


OPEN, SHUT, UNSURE = [], [("t/in", True)], [("t/in", False)]
TRAFFIC = Traffic(
    hook="input",
    nic="eth0",
    protocol="tcp",
    ports=(32768, 60999),
    local=ipaddress.ip_network("10.0.0.1"),
    peers=ipaddress.ip_network("10.0.0.0/24"),
)
USUAL = [
    [state("established", "related"), ACCEPT],
    [meta("iifname", "lo"), ACCEPT],
    [match({"ct": {"key": "status"}}, "dnat", "in"), ACCEPT],
    [match({"ct": {"key": "state"}}, "invalid", "in"), DROP],
    [meta("l4proto", {"set": ["icmp", "ipv6-icmp"]}), ACCEPT],
    [payload("tcp", "dport", 22), ACCEPT],
    [payload("ip6", "saddr", {"prefix": {"addr": "::", "len": 96}}), REJECT],
]
"""Rules that do not affect rails."""


@pytest.mark.parametrize(
    ("rules", "found"),
    [
        (base(), OPEN),
        (base(*USUAL), OPEN),
        (base(policy="drop"), SHUT),
        (base(*USUAL, policy="drop"), SHUT),
        (base(*USUAL, [REJECT]), SHUT),
        (base(*USUAL, [COUNTER, ACCEPT], policy="drop"), OPEN),
        (base([meta("iifname", "eth0"), ACCEPT], policy="drop"), OPEN),
        (base([meta("iifname", "eth*"), ACCEPT], policy="drop"), OPEN),
        (base([meta("iifname", "eth1"), ACCEPT], policy="drop"), SHUT),
        (base([meta("iifname", "eth1", "!="), DROP]), SHUT),
        (base([meta("oifname", "eth0"), DROP]), OPEN),
        (base([payload("tcp", "dport", {"range": [1024, 65535]}), DROP]), SHUT),
        (base([payload("tcp", "dport", {"set": [22, 40000]}), DROP]), UNSURE),
        (base([payload("tcp", "dport", {"range": [1, 1023]}), DROP]), OPEN),
        (base([payload("udp", "dport", 40000), DROP]), OPEN),
        (base([payload("udp", "dport", 4791, "!="), DROP]), OPEN),
        (base([payload("ip", "saddr", {"prefix": {"addr": "10.0.0.0", "len": 8}}), DROP]), SHUT),
        (base([payload("ip", "saddr", "10.0.0.2"), DROP]), UNSURE),
        (base([payload("ip", "saddr", {"range": ["192.0.2.1", "192.0.2.9"]}), DROP]), OPEN),
        (base([payload("ip", "saddr", "@banned"), DROP]), OPEN),
        (base([payload("ip", "saddr", "@empty"), DROP]), OPEN),
        (base([payload("ip", "saddr", "@unseen"), DROP]), UNSURE),
        (base([payload("ip", "daddr", "10.0.0.1", "!="), DROP]), OPEN),
        (base([meta("mark", 1), ACCEPT], policy="drop"), UNSURE),
        (base([{"limit": {"rate": 10, "per": "second", "inv": True}}, DROP]), UNSURE),
        (base([{"limit": {"rate": 10, "per": "second"}}, ACCEPT], [DROP]), UNSURE),
        (base([jump("sub")], sub=[meta("l4proto", "tcp"), DROP]), SHUT),
        (base([jump("sub")], policy="drop", sub=[ACCEPT]), OPEN),
        (base([jump("sub")], policy="drop", sub=[{"return": None}]), SHUT),
        (base([jump("sub")], [ACCEPT], policy="drop", sub=[{"return": None}]), OPEN),
        (base([jump("sub", "goto")], [ACCEPT], policy="drop", sub=[{"return": None}]), SHUT),
        (base([meta("mark", 1), {"return": None}], [DROP]), UNSURE),
        (base([by_nic(eth1=ACCEPT, eth0=jump("sub", "goto"))], [ACCEPT], sub=[DROP]), SHUT),
        (base([by_nic(eth1=DROP)]), OPEN),
        (base([{"xt": {"type": "target", "name": "REJECT"}}]), SHUT),
        (base([{"xt": None}, DROP]), UNSURE),
        (base(policy="drop", hook="output"), OPEN),
        (base(policy="drop", hook="forward"), OPEN),
    ],
)
def test_a_rails_first_packet_is_evaluated_by_the_rules(
    rules: Rules, found: list[tuple[str, bool]]
) -> None:
    assert list(firewall.dropped(rules, TRAFFIC)) == found


def test_outgoing_packets_are_evaluated_too() -> None:
    leaves = dataclasses.replace(TRAFFIC, hook="output")
    to_them = payload("ip", "daddr", {"prefix": {"addr": "10.0.0.0", "len": 24}})
    assert list(firewall.dropped(base(hook="output", policy="drop"), leaves)) == SHUT
    assert list(firewall.dropped(base([to_them, REJECT], hook="output"), leaves)) == SHUT
    assert list(firewall.dropped(base([meta("iif", "eth0"), DROP], hook="output"), leaves)) == OPEN


def test_each_address_family_has_separate_tables() -> None:
    chain = {"family": "ip6", "table": "t", "name": "in", "hook": "input", "policy": "drop"}
    rules = Rules(({"chain": chain},))
    new = dataclasses.replace(TRAFFIC, local=ipaddress.ip_network("fd00::1"), peers=None)
    assert list(firewall.dropped(rules, TRAFFIC)) == OPEN
    assert list(firewall.dropped(rules, new)) == SHUT
    nowhere = base([payload("ip6", "saddr", "fd00::2"), DROP])
    assert list(firewall.dropped(nowhere, new)) == UNSURE, "where peers are is not known"


def test_the_doctor_names_the_chain_and_the_dropped_traffic() -> None:
    [found] = findings(patient(rules=base(*USUAL, policy="drop")), "firewall")
    assert found.level == "warning"
    assert "t/in drops TCP to eth0 (10.0.0.1), TCP to eth1 (10.0.1.1)" in found.text
    assert found.fix
    [found] = findings(patient(rules=base([meta("mark", 1), DROP])), "firewall")
    assert (found.level, "may drop" in found.text) == ("note", True)
    assert findings(patient(rules=base(*USUAL)), "firewall")[0].level == "ok"


def test_the_fix_is_the_rule_that_accepts_the_rails() -> None:
    [found] = findings(patient(rules=base(*USUAL, policy="drop")), "firewall")
    accepts = 'nft insert rule inet t in iifname { "eth0", "eth1" } tcp dport 32768-60999 accept'
    assert found.fix.endswith(accepts)


def test_a_window_of_ports_is_what_the_packet_filter_must_accept() -> None:
    only = [payload("tcp", "dport", {"range": [40000, 40050]}), ACCEPT]
    shut = base(*USUAL, only, policy="drop")
    assert findings(patient(rules=shut), "firewall")[0].level == "note", "a part of the ports"
    open_ports = dataclasses.replace(shut, ports=(40000, 40050))
    assert findings(patient(rules=open_ports), "firewall")[0].level == "ok"


def test_without_nftables_the_rule_is_one_of_iptables() -> None:
    assert firewall.accepting(Rules(None), ["eth0", "eth1"], (40000, 40050)) == (
        "iptables -I INPUT -i eth0 -p tcp --dport 40000:40050 -j ACCEPT; "
        "iptables -I INPUT -i eth1 -p tcp --dport 40000:40050 -j ACCEPT"
    )


def test_only_soft_roce_asks_the_packet_filter() -> None:
    rules = base([payload("udp", "dport", 4791), DROP])
    assert findings(patient(rules=rules), "firewall")[0].level == "ok"
    here = patient(nic("eth0", soft_rdma=True), rules=rules)
    here = dataclasses.replace(here, node=dataclasses.replace(here.node, ports=(end(0),)))
    [found] = findings(here, "firewall")
    assert (found.level, "UDP port 4791 to eth0" in found.text) == ("warning", True)


def test_unreadable_rules_are_not_reported_as_empty() -> None:
    unread = Rules(None, "nft: Operation not permitted (you must be root)")
    [found] = findings(patient(rules=unread), "firewall")
    assert found.level == "note"
    assert "cannot be read" in found.text
    assert "Operation not permitted" in found.text
    assert "as root" in found.fix


@pytest.mark.parametrize(
    ("told", "level"),
    [
        ("-P INPUT ACCEPT\n-P FORWARD DROP\n-P OUTPUT ACCEPT", "ok"),
        ("-P INPUT DROP\n-P OUTPUT ACCEPT", "warning"),
        ("-P INPUT ACCEPT\n-A INPUT -j REJECT --reject-with icmp-port-unreachable", "warning"),
        ("-P INPUT ACCEPT\n-A INPUT -s 203.0.113.9/32 -j DROP", "note"),
    ],
)
def test_rules_of_the_old_iptables(told: str, level: str) -> None:
    [found] = findings(patient(rules=Rules((), legacy=told)), "firewall")
    assert found.level == level


def test_reading_without_root_reports_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = CommandOutput(why_not="nft: Operation not permitted (you must be root)")
    monkeypatch.setattr(system, "ask", lambda *_: refused)
    rules = firewall.read()
    assert rules.nft is None
    assert rules.why_not == refused.why_not
    assert rules.ports[0] < rules.ports[1]
