"""Makes a fault on the rail in use, in the middle of decoding, and reads what it cost.

What a rail carries and how long a collective waited is read from the journals that the workers
themselves write; the clock of all of them is CLOCK_MONOTONIC.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from r2serve.demo.report import FaultReport
from r2serve.lab.injector import Injector
from r2serve.lab.player import Played, Player
from r2serve.lab.schedule import Aim, Fault
from r2serve.lab.serving.journals import Journals, rail_in_use, rail_index
from r2serve.observe import journal

logger = logging.getLogger(__name__)

# How long a fault is left in place and watched: first until it must have been noticed, then to see
# where the traffic went.
NOTICE_S = 0.5
WATCH_S = 1.0
TRAFFIC_TIMEOUT_S = 5.0
LONGEST_S = NOTICE_S + WATCH_S + TRAFFIC_TIMEOUT_S
# The error of the times that are read off by looking, such as that of a rail's return.
POLL_S = 0.02
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


class EngineInjector:
    """Faults inside the engine, for a machine without a lab: one line a fault in a file.

    A fault takes the rail of that index at every node. rails: how many there are.
    """

    def __init__(self, path: Path, rails: int) -> None:
        self._path = path
        self.rails = rails

    def make(self, kind: str, node: int, rail: int | None) -> None:
        self._write(rail, kind)

    def undo(self, kind: str, node: int, rail: int | None) -> None:
        self._write(rail, "heal")

    def _write(self, rail: int | None, word: str) -> None:
        if rail is None:
            raise ValueError("rail is None: must be an index, the engine has no management NIC")
        with self._path.open("a", encoding="ascii") as file:
            file.write(f"{rail} {word}\n")


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


class Traffic:
    """Which rail carries the traffic before a fault and under it, by readings of sent bytes.

    rail, bytes_before: the rail that is struck, and the bytes of the step before. rail_after: the
    rail in use under the fault; None: not known yet. The first reading comes NOTICE_S after the
    strike and the second WATCH_S later. Where decoding has paused for another reason, further ones
    follow until something was sent.
    """

    def __init__(self, sent_bytes: Callable[[], Counter[int]]) -> None:
        self.rail = 0
        self.bytes_before = 0
        self.rail_after: int | None = None
        self._sent_bytes = sent_bytes
        self._first: Counter[int] | None = None
        self._due_s = NOTICE_S

    def seen(self, since_s: float) -> bool:
        """Takes the reading due so long after the strike; whether rail_after is known."""
        if self.rail_after is None and since_s >= self._due_s:
            now = self._sent_bytes()
            if self._first is None:
                self._first, self._due_s = now, since_s + WATCH_S
            elif used := rail_in_use(self._first, now):
                self.rail_after, _ = used
        return self.rail_after is not None


class Striker:
    """Makes the demo's faults, one after the other; ``played`` has those that counted.

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
        self.played: list[Played] = []

    def fault(self, kind: str, node: int, avoid: int | None = None) -> tuple[int, FaultReport]:
        """Strikes the rail in use until a collective was stalled; returns the rail's index too.

        avoid: a rail that is to be the one only if no other comes into use soon.
        Raises FaultError when no rail is in use or decoding ends before.
        """
        for missed in range(MAX_STRIKES):
            played, report = self._strike_once(kind, node, avoid)
            report.missed_strikes = missed
            if (report.stalls and report.replayed_chunks) or missed == MAX_STRIKES - 1:
                break
            self._watch(f"{kind} on {report.rail} fell between two collectives; once more")
        self.played.append(played)
        return played.rails[0], report

    def _strike_once(self, kind: str, node: int, avoid: int | None) -> tuple[Played, FaultReport]:
        played, traffic = self._play(kind, node, avoid)
        assert played.healed_ns is not None
        events = self._journals.events(played.struck_ns, played.healed_ns)
        cost, back_ns = cost_of(events, traffic.rail), played.back_ns
        name, after = _name(traffic.rail, node), traffic.rail_after
        self._watch(f"{kind} on {name}: stalled {cost.stall_ms_max:.1f} ms; healed")
        report = FaultReport(
            kind=kind,
            rail=name,
            bytes_before=traffic.bytes_before,
            replayed_chunks=cost.replayed_chunks,
            hedged_chunks=cost.hedged_chunks,
            rail_after="" if after is None else _name(after, node),
            stall_ms_max=cost.stall_ms_max,
            stalls=cost.stalls,
            missed_strikes=0,
            rejoin_ms=None if back_ns is None else (back_ns - played.healed_ns) / 1e6,
        )
        return played, report

    def _play(self, kind: str, node: int, avoid: int | None) -> tuple[Played, Traffic]:
        """One fault, from the choice of its rail until all rails are UP again."""
        traffic = Traffic(self._journals.sent_bytes)

        def aim() -> int:
            traffic.rail, traffic.bytes_before = self._aim(kind, avoid)
            return traffic.rail

        def attend() -> None:
            for played in player.played:
                since_s = (time.monotonic_ns() - played.struck_ns) / 1e9
                if played.healed_ns is None and traffic.seen(since_s):
                    player.over.set()

        player = Player(
            [Fault(0.0, kind, node, Aim.IN_USE, LONGEST_S)],
            self._injector,
            seconds=LONGEST_S,
            rails=self._journals,
            aim=aim,
            attend=attend,
            poll_s=POLL_S,
            watch=self._watch,
            text_of=lambda _: f"{kind} on {_name(traffic.rail, node)}",
        )
        player.play()
        (played,) = player.played
        return played, traffic

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


def _name(rail: int, node: int) -> str:
    return f"rail{rail}@node{node}"
