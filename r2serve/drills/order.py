"""Parameters of a drill: kind, rail, duration, and the range of each."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("carrier_loss", "black_hole", "egress_refused", "slow", "flap", "corrupt")
SYSTEM_KINDS = ("egress_refused",)
"""Kinds that only the operating system can make."""
SYSTEM, ENGINE = "system", "engine"
"""Origin of the fault: the operating system, via the drill command, or the worker's engine."""
LONGEST_S = 3600.0


class DrillError(ValueError):
    """The drill is impossible; the text names the field, its value and what would be right."""


@dataclass(frozen=True)
class Order:
    """Parameters of a requested drill.

    Raises:
        DrillError: a field is wrong.
    """

    id: str
    kind: str
    rail: str
    seconds: float
    peer: str = ""
    """Label of a peer for a fault towards this peer alone; empty: all peers."""
    mbit: float = 10.0
    """Send rate that remains under ``slow``, in Mbit/s."""
    period_s: float = 1.0
    """Period of ``flap`` in seconds; the port has no carrier in half of each period."""
    by: str = ENGINE

    def __post_init__(self) -> None:
        if not (isinstance(self.id, str) and 0 < len(self.id) <= 64):
            raise DrillError(f"id: {self.id!r} must be text of 1 to 64 characters")
        if self.kind not in KINDS:
            raise DrillError(f"kind: {self.kind!r} must be one of {', '.join(KINDS)}")
        if self.by not in (SYSTEM, ENGINE):
            raise DrillError(f"by: {self.by!r} must be {SYSTEM} or {ENGINE}")
        if self.kind in SYSTEM_KINDS and self.by == ENGINE:
            raise DrillError(f"by: {self.by!r} cannot make {self.kind}; must be {SYSTEM}")
        for name, low, high in (
            ("seconds", 0.01, LONGEST_S),
            ("mbit", 0.001, 1e6),
            ("period_s", 0.02, LONGEST_S),
        ):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not low <= value <= high:
                raise DrillError(f"{name}: {value!r} must be a number from {low:g} to {high:g}")
