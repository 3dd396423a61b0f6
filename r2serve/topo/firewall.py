"""Simulation of the node's packet filter for rail traffic, on rules as listed by ``nft -j``.

A rail's first packet passes through the rules of each chain. Some rules depend on facts unknown
here (an address set, a mark, a rate); such rules count as a possible drop.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from r2serve.topo import system

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Known = bool | None
"""A truth value; None: depends on unknown facts."""
Fact = str | tuple[int, int] | None
"""A word, or the first and last number of a range; None: unknown."""

_OPEN_PORTS = (1024, 65535)
"""Range of source ports of rails."""
_DEEPEST = 16
"""Deepest nesting of jumps followed."""
_NO_MATCH = ("counter", "log", "mangle", "notrack")
"""Statements without influence on the verdict of a rule."""


@dataclass(frozen=True)
class Rules:
    """All packet-filter rules of this network namespace."""

    nft: tuple[dict[str, Any], ...] | None
    """Rules of nftables; None: not readable."""
    why_not: str = ""
    legacy: str = ""
    """Output of ``iptables-legacy -S``, as nft does not list legacy rules; empty: no rules."""
    ports: tuple[int, int] = (32768, 60999)
    """Range of listening ports of TCP rails."""


@dataclass(frozen=True)
class Traffic:
    """First packets of a NIC's rails in one direction."""

    hook: str
    """``input`` or ``output``."""
    nic: str
    protocol: str
    ports: tuple[int, int]
    """Range of destination ports."""
    local: Network
    """Address of the NIC, as a network of a single address."""
    peers: Network | None
    """Network of the peers; None: unknown."""

    def __str__(self) -> str:
        port = f" port {self.ports[0]}" if self.ports[0] == self.ports[1] else ""
        way = "to" if self.hook == "input" else "from"
        return f"{self.protocol.upper()}{port} {way} {self.nic} ({self.local.network_address})"


def read(window: tuple[int, int] | None = None) -> Rules:
    """Reads the current rules of this network namespace.

    window: range of listening ports (``R2CCL_PORTS``); None: the kernel's range.
    """
    told = system.ask("nft", "-j", "list", "ruleset")
    ports = window or system.local_ports()
    if told.why_not:
        return Rules(None, told.why_not, _legacy(), ports)
    return Rules(tuple(json.loads(told.text)["nftables"]), "", _legacy(), ports)


def _legacy() -> str:
    """Returns the legacy rules; runs iptables-legacy only where a table exists.

    iptables-legacy would create a missing table.
    """
    try:
        tables = Path("/proc/net/ip_tables_names").read_text().split()
    except OSError:
        return ""
    return system.ask("iptables-legacy", "-S").text if "filter" in tables else ""


def dropped(rules: Rules, traffic: Traffic) -> Iterator[tuple[str, bool]]:
    """Yields chains that drop or reject the traffic, and whether the drop is certain."""
    tables: dict[tuple[str, str], _Table] = defaultdict(_Table)
    for entry in rules.nft or ():
        [(kind, body)] = entry.items()
        if kind == "rule":
            table = tables[body["family"], body["table"]]
            table.rules[body["chain"]].append(body.get("expr", []))
        elif kind in ("set", "map"):
            tables[body["family"], body["table"]].sets[body["name"]] = body.get("elem", [])
    families = ("inet", "ip" if traffic.local.version == 4 else "ip6")
    for entry in rules.nft or ():
        chain = entry.get("chain", {})
        if chain.get("hook") != traffic.hook or chain["family"] not in families:
            continue
        walk = _Walk(traffic, tables[chain["family"], chain["table"]])
        certain = walk.is_dropped(chain["name"], chain.get("policy", "accept"))
        if certain is not False:
            yield f"{chain['table']}/{chain['name']}", bool(certain)


def accepting(rules: Rules, nics: Sequence[str], ports: tuple[int, int]) -> str:
    """Returns the command that accepts connections to a range of TCP ports on some NICs.

    The command inserts a rule into the first chain of nftables that sees incoming packets. Without
    such a chain, or without nftables, the command is one of iptables.
    """
    chains = [entry["chain"] for entry in rules.nft or () if "chain" in entry]
    for family in ("inet", "ip", "ip6"):
        for chain in chains:
            if chain.get("hook") != "input" or chain["family"] != family:
                continue
            named = ", ".join(f'"{nic}"' for nic in nics if nic)
            only = f"iifname {{ {named} }} " if named else ""
            what = f"{only}tcp dport {ports[0]}-{ports[1]} accept"
            return f"nft insert rule {family} {chain['table']} {chain['name']} {what}"
    return "; ".join(
        f"iptables -I INPUT {f'-i {nic} ' if nic else ''}-p tcp --dport {ports[0]}:{ports[1]} "
        "-j ACCEPT"
        for nic in nics or [""]
    )


def dropped_by_legacy(rules: Rules) -> tuple[list[str], bool]:
    """Returns legacy rules with drop or reject, and whether a rule drops all traffic."""
    found = re.findall(
        r"^-P (?:INPUT|OUTPUT) DROP$|^-A (?:INPUT|OUTPUT) .*-j (?:DROP|REJECT).*$",
        rules.legacy,
        re.MULTILINE,
    )
    return found, any(rule.split()[0] == "-P" or rule.split()[2] == "-j" for rule in found)


# ---- a packet's way through a chain ----


def _both(one: Known, other: Known) -> Known:
    """Returns whether both hold."""
    if one is False or other is False:
        return False
    return None if one is None or other is None else True


@dataclass(frozen=True)
class _Table:
    rules: dict[str, list[list[dict[str, Any]]]] = field(default_factory=lambda: defaultdict(list))
    """Rules of each chain."""
    sets: dict[str, list[Any]] = field(default_factory=dict)
    """Current elements of each named set or map."""


@dataclass(frozen=True)
class _Walk:
    """The way of a packet through the chains of a table."""

    traffic: Traffic
    table: _Table

    def is_dropped(self, chain: str, policy: str) -> Known:
        """Whether the chain drops the packet; ``policy`` applies at the end of the chain."""
        may_accept = may_drop = False
        for certain, accepts in [*self._verdicts(chain, True, 0), (True, policy == "accept")]:
            if certain and accepts:
                return None if may_drop else False
            if certain:
                return None if may_accept else True
            may_accept |= accepts
            may_drop |= not accepts
        return None

    def _verdicts(self, chain: str, reached: Known, depth: int) -> Iterator[tuple[Known, bool]]:
        """Yields for each verdict whether the packet reaches it (None: unknown), and its effect.

        The effect is True for accept, False for drop and reject.
        """
        if depth > _DEEPEST:
            return
        for rule in self.table.rules.get(chain, ()):
            for holds, verdict, target in self._outcomes(rule):
                certain = _both(reached, holds)
                if certain is False:
                    continue
                if verdict in ("accept", "drop", "reject"):
                    yield certain, verdict == "accept"
                elif verdict in ("jump", "goto"):
                    yield from self._verdicts(target, certain, depth + 1)
                if verdict != "jump" and holds:
                    return  # the packet does not reach the next rule
                if verdict in ("goto", "return"):
                    reached = None

    def _outcomes(self, rule: list[dict[str, Any]]) -> Iterator[tuple[Known, str, str]]:
        """Yields whether the rule matches (None: unknown), the verdict, and the jump's target."""
        holds: Known = True
        for statement in rule:
            name, body = next(iter(statement.items()))
            if name == "match":
                holds = _both(holds, self._matches(body["left"], body["op"], body["right"]))
            elif name == "vmap":
                yield from self._mapped(body, holds)
            elif name in ("accept", "drop", "reject", "return"):
                yield holds, name, ""
            elif name in ("jump", "goto"):
                yield holds, name, body["target"]
            elif name == "xt":  # an extension of iptables; nft lists only the name
                if isinstance(body, dict) and body.get("name") in ("DROP", "REJECT"):
                    yield holds, "drop", ""
                holds = _both(holds, None)
            elif name not in _NO_MATCH:
                holds = _both(holds, None)

    def _mapped(self, body: dict[str, Any], holds: Known) -> Iterator[tuple[Known, str, str]]:
        for key, verdict in self._elements(body["data"]) or []:
            name, to = next(iter(verdict.items()))
            matches = self._matches(body["key"], "==", key)
            yield _both(holds, matches), name, to["target"] if to else ""

    def _elements(self, of: Any) -> list[Any] | None:
        """Returns the elements of a named set or a set in a rule; None: not a set."""
        if isinstance(of, str) and of.startswith("@"):
            return self.table.sets.get(of[1:], [{"unknown": of}])
        if isinstance(of, dict):
            of = of.get("set", of.get("|"))
        return of if isinstance(of, list) else None

    def _matches(self, left: dict[str, Any], operator: str, right: Any) -> Known:
        kind, what = next(iter(left.items()))
        if kind == "payload" and self._is_of_another_protocol(what):
            return False
        known = self._is_in(self._fact(kind, what), right)
        if operator == "!=":
            return None if known is None else not known
        return known if operator in ("==", "in") else None

    def _is_of_another_protocol(self, what: dict[str, Any]) -> bool:
        here = {"th", "ether", self.traffic.protocol}
        here.add("ip" if self.traffic.local.version == 4 else "ip6")
        return what.get("protocol", "th") not in here

    def _fact(self, kind: str, what: Any) -> Fact:
        """Returns a fact about the packet; None: unknown."""
        traffic, comes_in = self.traffic, self.traffic.hook == "input"
        newer = traffic.local.version == 6
        if kind == "ct":  # a new connection without address translation
            return {"state": "new", "status": "", "direction": "original"}.get(what.get("key", ""))
        if kind == "meta":
            facts: dict[str, str] = {
                "l4proto": traffic.protocol,
                "nfproto": "ipv6" if newer else "ipv4",
                "protocol": "ip6" if newer else "ip",
            }
            for end in ("f", "fname"):
                facts[f"ii{end}"] = traffic.nic if comes_in else ""
                facts[f"oi{end}"] = "" if comes_in else traffic.nic
            return facts.get(what.get("key", ""))
        if kind != "payload" or what.get("protocol") == "ether":
            return None
        peers = _span(str(traffic.peers)) if traffic.peers else None
        own = _span(str(traffic.local))
        found: dict[str, Fact] = {
            "protocol": traffic.protocol,
            "nexthdr": traffic.protocol,
            "dport": traffic.ports,
            "sport": _OPEN_PORTS,
            "saddr": peers if comes_in else own,
            "daddr": own if comes_in else peers,
        }
        return found.get(what.get("field", ""))

    def _is_in(self, fact: Fact, right: Any) -> Known:
        """Whether a fact matches a rule's operand: a value, range, prefix or set of these."""
        elements = right if isinstance(right, list) else self._elements(right)
        if elements is not None:
            known = [self._is_in(fact, each) for each in elements]
            return True if True in known else None if None in known else False
        if isinstance(right, dict) and "elem" in right:
            right = right["elem"]["val"]
        if isinstance(fact, str) and isinstance(right, str):
            return fact.startswith(right[:-1]) if right.endswith("*") else fact == right
        asked = _span(right)
        if asked is None or fact is None or isinstance(fact, str):
            return None
        if asked[0] <= fact[0] and fact[1] <= asked[1]:
            return True
        return None if asked[0] <= fact[1] and fact[0] <= asked[1] else False


def _span(of: Any) -> tuple[int, int] | None:
    """Returns the first and last number of a port, address, prefix or range, or None."""
    try:
        if isinstance(of, dict) and "range" in of:
            first, last = map(_span, of["range"])
            return (first[0], last[1]) if first and last else None
        if isinstance(of, dict):
            of = f"{of['prefix']['addr']}/{of['prefix']['len']}"
        if isinstance(of, int):
            return of, of
        asked = ipaddress.ip_network(of, strict=False)
    except (KeyError, TypeError, ValueError):
        return None
    return int(asked.network_address), int(asked.broadcast_address)
