"""Injectors: the interface of a player to a lab, or to another system with nodes and rails."""

from __future__ import annotations

from typing import Protocol

from r2serve.lab.kinds import KINDS
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
        KINDS[kind].make(self._lab, node, rail)

    def undo(self, kind: str, node: int, rail: int | None) -> None:
        KINDS[kind].undo(self._lab, node, rail)
