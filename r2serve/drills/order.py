"""What a drill is asked for by: kind, rail, time, and the bounds of each."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("carrier_loss", "black_hole", "slow", "flap", "corrupt")
SYSTEM, ENGINE = "system", "engine"
"""Who makes the fault: the operating system, told by the drill command, or the worker's engine."""
LONGEST_S = 3600.0


class DrillError(ValueError):
    """The drill cannot be; the text names the field, its value and what would be right."""


@dataclass(frozen=True)
class Order:
    """What is asked for.

    Raises:
        DrillError: a field is wrong.
    """

    id: str
    kind: str
    rail: str
    seconds: float
    peer: str = ""
    """Of one peer alone; empty: of all."""
    mbit: float = 10.0
    """Of ``slow``: Mbit/s that this end still sends."""
    period_s: float = 1.0
    """Of ``flap``: half of it lost, half of it not."""
    by: str = ENGINE

    def __post_init__(self) -> None:
        if not (isinstance(self.id, str) and 0 < len(self.id) <= 64):
            raise DrillError(f"id: {self.id!r} must be text of 1 to 64 letters")
        if self.kind not in KINDS:
            raise DrillError(f"kind: {self.kind!r} must be one of {', '.join(KINDS)}")
        if self.by not in (SYSTEM, ENGINE):
            raise DrillError(f"by: {self.by!r} must be {SYSTEM} or {ENGINE}")
        for name, low, high in (
            ("seconds", 0.01, LONGEST_S),
            ("mbit", 0.001, 1e6),
            ("period_s", 0.02, LONGEST_S),
        ):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not low <= value <= high:
                raise DrillError(f"{name}: {value!r} must be a number from {low:g} to {high:g}")
