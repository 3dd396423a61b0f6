"""Inputs and findings of the doctor's checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from r2serve.config import Config
from r2serve.ports.info import PortInfo
from r2serve.topo.firewall import Rules
from r2serve.topo.node import Nic, NodeReport
from r2serve.topo.peer import End, Peer

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
class HostName:
    """The host's name, the addresses behind it, and the devices that gloo uses instead."""

    name: str
    addresses: tuple[str, ...] = ()
    gloo: tuple[str, ...] = ()
    """Devices in GLOO_SOCKET_IFNAME."""
    devices: frozenset[str] = frozenset()
    """All devices of this node."""
    control: str = ""
    """Address of this node that the engine's variable names; empty: none."""


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
    setting: Callable[[str, str], int]
    """Returns a setting of IPv4 for an interface and a name, as ``arp_ignore``."""
    host_name: HostName = HostName("this-node", ("10.9.0.1",))
    pyverbs: str = "ok"
    """``ok``, or the reason why pyverbs cannot be loaded."""
    peer: Peer | None = None
    """Another node, for checks of rails between both nodes."""
    free_ports: Callable[[PortInfo, tuple[int, int]], int] = lambda _, window: (
        window[1] - window[0] + 1
    )
    """Returns the number of free ports of a range at the address of a port."""
    kernel_ports: tuple[int, int] = (32768, 60999)
    """First and last port that the kernel gives to connections and to listeners without a port."""
    reserved_ports: str = ""
    """Ports that the kernel keeps free of outgoing connections, as ``4000,5000-5010``."""
    route: Callable[[End, End], str] = lambda _own, _other: ""
    """Returns why a port has no route to a peer's port; empty: a route exists."""

    @property
    def rails(self) -> list[Nic]:
        return [nic for nic in self.node.nics if nic.rail]

    @property
    def verbs_rails(self) -> list[Nic]:
        return [nic for nic in self.rails if "verbs" in nic.kind]


Check = Callable[[Patient], Iterable[Finding]]
