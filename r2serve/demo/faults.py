"""Makes a fault on the rail in use, in the middle of decoding, and reads what it cost.

What a rail carries and how long a collective waited is read from the journals that the workers
themselves write; the clock of all of them is CLOCK_MONOTONIC.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from r2serve.demo.report import FaultReport
from r2serve.lab.kinds import KINDS
from r2serve.lab.lab import Lab
from r2serve.lab.serving.journals import Journals, rail_in_use, rail_index
from r2serve.observe import journal

logger = logging.getLogger(__name__)

# How long a fault is left in place and watched: first until it must have been noticed, then to see
# where the traffic went.
NOTICE_S = 0.5
WATCH_S = 1.0
TRAFFIC_TIMEOUT_S = 5.0
REJOIN_TIMEOUT_S = 20.0
AIM_TIMEOUT_S = 10.0
# So long another rail than the last one is waited for; traffic may have gone back to that.
PREFER_S = 2.0
# When a rail is given up, the peer waits for what is replayed; a wait that begins later than this
# is for something else.
REPLAY_ARRIVES_NS = 50_000_000
# A port event that falls between two collectives stalls none; the strike is then repeated.
MAX_STRIKES = 6


class FaultError(RuntimeError):
    """The fault could not be made as planned."""


class Injector(Protocol):
    """Makes and heals faults on rail `rail` at node `node`."""

    def strike(self, kind: str, node: int, rail: int) -> None: ...

    def heal(self, node: int, rail: int) -> None: ...


class LabInjector:
    """Faults in the lab's network."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    def strike(self, kind: str, node: int, rail: int) -> None:
        KINDS[kind].make(self._lab, node, rail)

    def heal(self, node: int, rail: int) -> None:
        self._lab.heal(node, rail)


class EngineInjector:
    """Faults inside the engine, for a machine without a lab: one line a fault in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def strike(self, kind: str, node: int, rail: int) -> None:
        self._write(f"{rail} {kind}")

    def heal(self, node: int, rail: int) -> None:
        self._write(f"{rail} heal")

    def _write(self, line: str) -> None:
        with self._path.open("a", encoding="ascii") as file:
            file.write(line + "\n")


@dataclass(frozen=True)
class Cost:
    """What the workers wrote about one fault."""

    stalls: int
    stall_ms_max: float
    replayed_chunks: int
    hedged_chunks: int


def cost_of(events: Sequence[journal.Event], rail: int) -> Cost:
    """Sums up what a fault on this rail cost. A hedge is a replay that did not await the verdict.

    A collective also waits when the other rank is late, which on a busy machine happens around a
    fault as well. So a stall counts only if something was replayed from this rail in it.
    """
    moves = [
        event
        for event in events
        if event.kind in ("replay", "hedge") and event.rail and rail_index(event.rail) == rail
    ]
    hedged = sum(event.value for event in moves if event.kind == "hedge")
    replayed = sum(event.value for event in moves)
    begin_ns = min((event.time_ns for event in moves), default=0)
    end_ns = max((event.time_ns for event in moves), default=0) + REPLAY_ARRIVES_NS
    stalls = [
        event.value / 1e6
        for event in events
        if moves
        and event.kind == "stall"
        and event.time_ns >= begin_ns
        and event.time_ns - event.value <= end_ns
    ]
    return Cost(len(stalls), max(stalls, default=0.0), replayed, hedged)


@dataclass(frozen=True)
class Window:
    """When a fault was made, healed, and the rail back, in CLOCK_MONOTONIC ns."""

    struck_ns: int
    healed_ns: int
    back_ns: int


class Striker:
    """Makes the demo's faults, one after the other.

    step_s: length of a decode step. decoding: whether tokens are still to come.
    """

    def __init__(
        self,
        journals: Journals,
        injector: Injector,
        step_s: float,
        decoding: Callable[[], bool],
        watch: Callable[[str], None],
    ) -> None:
        self._journals = journals
        self._injector = injector
        self._step_s = max(step_s, 0.002)
        self._decoding = decoding
        self._watch = watch
        self.windows: list[Window] = []

    def fault(self, kind: str, node: int, avoid: int | None = None) -> tuple[int, FaultReport]:
        """Strikes the rail in use until a collective was stalled; returns the rail's index too.

        avoid: a rail that is to be the one only if no other comes into use soon.
        Raises FaultError when no rail is in use or decoding ends before.
        """
        for missed in range(MAX_STRIKES):
            rail, report, window = self._strike_once(kind, node, avoid)
            report.missed_strikes = missed
            if (report.stalls and report.replayed_chunks) or missed == MAX_STRIKES - 1:
                break
            self._watch(f"{kind} on {report.rail} fell between two collectives; once more")
        self.windows.append(window)
        return rail, report

    def _strike_once(
        self, kind: str, node: int, avoid: int | None
    ) -> tuple[int, FaultReport, Window]:
        rail, bytes_before = self._aim(kind, avoid)
        name = f"rail{rail}@node{node}"
        struck_ns = time.monotonic_ns()
        self._injector.strike(kind, node, rail)
        try:
            self._watch(f"{kind} on {name}")
            time.sleep(NOTICE_S)
            after = self._use_later()
            healed_ns = time.monotonic_ns()
        finally:
            self._injector.heal(node, rail)
        cost = cost_of(self._journals.events(struck_ns, healed_ns), rail)
        self._watch(f"{kind} on {name}: stalled {cost.stall_ms_max:.1f} ms; healed")
        back_ns = self._wait_until_all_up()
        report = FaultReport(
            kind=kind,
            rail=name,
            bytes_before=bytes_before,
            replayed_chunks=cost.replayed_chunks,
            hedged_chunks=cost.hedged_chunks,
            rail_after="" if after is None else f"rail{after[0]}@node{node}",
            stall_ms_max=cost.stall_ms_max,
            stalls=cost.stalls,
            missed_strikes=0,
            rejoin_ms=None if back_ns is None else (back_ns - healed_ns) / 1e6,
        )
        return rail, report, Window(struck_ns, healed_ns, back_ns or time.monotonic_ns())

    def _aim(self, kind: str, avoid: int | None) -> tuple[int, int]:
        """The rail that carried the last step's bytes, if possible not avoid, and those bytes."""
        began = time.monotonic()
        while time.monotonic() < began + AIM_TIMEOUT_S:
            if not self._decoding():
                raise FaultError(f"decoding ended before the {kind} fault could be made")
            used = self._use_now()
            if used is not None and (used[0] != avoid or time.monotonic() > began + PREFER_S):
                return used
        raise FaultError(
            f"no rail to strike with {kind}: none carried anything for {AIM_TIMEOUT_S:.0f} s"
        )

    def _use_now(self) -> tuple[int, int] | None:
        before = self._journals.sent_bytes()
        time.sleep(self._step_s)
        return rail_in_use(before, self._journals.sent_bytes())

    def _use_later(self) -> tuple[int, int] | None:
        """The rail in use over WATCH_S, or longer where decoding has paused for another reason."""
        before = self._journals.sent_bytes()
        time.sleep(WATCH_S)
        deadline = time.monotonic() + TRAFFIC_TIMEOUT_S
        used = rail_in_use(before, self._journals.sent_bytes())
        while used is None and time.monotonic() < deadline:
            time.sleep(self._step_s)
            used = rail_in_use(before, self._journals.sent_bytes())
        return used

    def _wait_until_all_up(self) -> int | None:
        deadline = time.monotonic() + REJOIN_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._journals.all_up():
                return time.monotonic_ns()
            time.sleep(0.02)
        return None
