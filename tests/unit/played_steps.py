"""Steps of a worker with a played engine and a played clock: every duration is exact."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from r2serve.observe import attribution, journal
from r2serve.observe.attribution import Attribution, Step, next_step
from r2serve.observe.journal import Event, Group, Journal

GROUP = Group(
    name="tp:0",
    id=7,
    rank=0,
    ranks=2,
    call="",
    call_began_ns=0,
    failed_calls=0,
    stalled_calls=0,
    stalled_ns=0,
    closed=False,
    latencies={},
)


class PlayedEngine:
    """The view that an attribution has of an engine; stalls are recorded by :meth:`stall`."""

    process = 1

    def __init__(self, folder: Path) -> None:
        self.journal_path = str(folder / "r2ccl-1-1.journal")
        self.stalled_ns = 0
        self.now_ns = 10**12
        self.delay_ns = 0
        self.step = 0
        self.events: list[Event] = []

    def journal_bytes(self) -> bytes:
        return b""

    def set_step(self, step: int) -> None:
        self.step = step

    def parse(self, _: bytes, *, events: bool = True, after: int = 0) -> Journal:
        """Stands in for :func:`r2serve.observe.journal.parse`."""
        return Journal(
            process=1,
            events=self.events[after:] if events else [],
            groups=[GROUP],
            label="rank 0",
            record_count=len(self.events),
        )

    def stall(self, seconds: float) -> None:
        """Records a stall that ends now."""
        self.stalled_ns += ns(seconds)
        count = len(self.events) + 1
        self.events.append(
            Event(
                time_ns=self.now_ns,
                kind="stall",
                rail="",
                peer="",
                epoch=self.step,
                comm=GROUP.id,
                call=count,
                value=ns(seconds),
                detail=4000,
                text="all_reduce",
                sequence=count,
            )
        )


class PlayedJob:
    """An attribution whose time passes only by :meth:`passes`."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.engine = PlayedEngine(folder)
        patch.setattr(journal, "parse", self.engine.parse)
        patch.setattr(attribution, "time", SimpleNamespace(monotonic_ns=lambda: self.engine.now_ns))
        patch.setattr(attribution, "run_delay_ns", lambda: self.engine.delay_ns)
        self.number = 0
        self.attribution = Attribution(lambda: [self.engine], {"model_name": "m", "engine": "3"})

    def passes(self, seconds: float, *, waiting_for_cpu: bool = False) -> None:
        self.engine.now_ns += ns(seconds)
        if waiting_for_cpu:
            self.engine.delay_ns += ns(seconds)

    def began(self, **parts: Any) -> None:
        fields: dict[str, Any] = {"prefill": [], "decode": [], "yielding": []}
        fields |= parts
        if not fields["prefill"]:
            fields.setdefault("tokens", len(fields["decode"]))
        self.number = next_step(self.number)
        self.attribution.began(Step(number=self.number, **fields))

    def part(self, takes_s: float, *, stall_s: float = 0.0, sampled: bool = True) -> None:
        """Plays a part of a step; a stall is its end."""
        self.passes(takes_s + stall_s)
        if stall_s:
            self.engine.stall(stall_s)
        self.attribution.ended(sampled=sampled)

    def step(self, takes_s: float = 0.01, *, stall_s: float = 0.0, **parts: Any) -> None:
        self.began(**parts)
        self.part(takes_s, stall_s=stall_s)

    def close(self) -> None:
        self.attribution.close()  # otherwise a timer logs during a later test


def ns(seconds: float) -> int:
    return round(seconds * 1e9)
