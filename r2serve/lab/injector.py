"""Injectors: the interface of a player to a lab, or to another system with nodes and rails."""

from __future__ import annotations

from typing import Protocol

from r2serve.lab.kinds import FaultMaker, kind_of
from r2serve.lab.lab import Lab


class Injector(Protocol):
    """Makes and undoes faults, named as in :data:`r2serve.lab.kinds.KINDS`.

    rail: index of the node's rail; None = the management NIC. rails: number of rails per node.
    """

    @property
    def rails(self) -> int: ...

    def make(self, kind: str, node: int, rail: int | None) -> None: ...

    def undo(self, kind: str, node: int, rail: int | None) -> None: ...


class LabInjector:
    """Makes faults in the network of a lab; raises LabCommandError if the kernel refuses."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    @property
    def rails(self) -> int:
        return self._lab.rails

    def make(self, kind: str, node: int, rail: int | None) -> None:
        _maker(kind, rail).make(self._lab, node, rail or 0)

    def undo(self, kind: str, node: int, rail: int | None) -> None:
        _maker(kind, rail).undo(self._lab, node, rail or 0)


def _maker(kind: str, rail: int | None) -> FaultMaker:
    return kind_of(kind, management=rail is None)
