"""Inputs and findings of the doctor's checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from r2serve.config import Config
from r2serve.topo.firewall import Rules
from r2serve.topo.node import Nic, NodeReport
from r2serve.topo.peer import Peer

OK, NOTE, WARNING, FAILURE = "ok", "note", "warning", "failure"


@dataclass(frozen=True)
class Finding:
    """A result of a check; ``fix`` is a command or an advice, empty if nothing is to do."""

    level: str
    """``failure``: a rail cannot work; ``warning``: a rail may fail, or perform badly; ``note``:
    information; ``ok``: the check found no problem."""
    check: str
    text: str
    fix: str = ""


@dataclass(frozen=True)
class Patient:
    """Input of all checks: the node and its environment."""

    node: NodeReport
    config: Config
    memlock_bytes: int
    """Limit on locked memory; -1: no limit."""
    uverbs: tuple[Path, ...]
    modules: frozenset[str]
    rules: Rules
    """Rules of the packet filter."""
    pfc: Callable[[str], str]
    """Returns the output of ``dcb pfc show`` for an interface; empty: no output available."""
    arp_ignore: Callable[[str], int]
    pyverbs: str = "ok"
    """``ok``, or the reason why pyverbs cannot be loaded."""
    peer: Peer | None = None
    """Another node, for checks of rails between both nodes."""

    @property
    def rails(self) -> list[Nic]:
        return [nic for nic in self.node.nics if nic.rail]

    @property
    def verbs_rails(self) -> list[Nic]:
        return [nic for nic in self.rails if "verbs" in nic.kind]


Check = Callable[[Patient], Iterable[Finding]]
