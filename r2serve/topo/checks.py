"""What the doctor's checks look at, and what they find."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from r2serve.config import Config
from r2serve.topo.firewall import Rules
from r2serve.topo.node import Nic, Node
from r2serve.topo.peer import Peer

OK, NOTE, WARNING, FAILURE = "ok", "note", "warning", "failure"


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
    rules: Rules
    """Of the packet filter."""
    pfc: Callable[[str], str]
    """What ``dcb pfc show`` says of an interface; empty: it cannot be asked."""
    arp_ignore: Callable[[str], int]
    pyverbs: str = "ok"
    """``ok``, or why it cannot be loaded."""
    peer: Peer | None = None
    """Another node, whose ports are to make rails with this one's."""

    @property
    def rails(self) -> list[Nic]:
        return [nic for nic in self.node.nics if nic.rail]

    @property
    def verbs_rails(self) -> list[Nic]:
        return [nic for nic in self.rails if "verbs" in nic.kind]


Check = Callable[[Patient], Iterable[Finding]]
