"""Makes faults on the rail in use during decoding, and computes the cost.

Traffic and stalls come from the workers' journals; all times are CLOCK_MONOTONIC.
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
from r2serve.lab.rails import busiest_rail
from r2serve.lab.schedule import Aim, Fault
from r2serve.lab.serving.journals import Journals
from r2serve.observe import journal

logger = logging.getLogger(__name__)

# Phases of a fault: time for detection, then time to observe the new path of the traffic.
NOTICE_S = 0.5
WATCH_S = 1.0
TRAFFIC_TIMEOUT_S = 5.0
LONGEST_S = NOTICE_S + WATCH_S + TRAFFIC_TIMEOUT_S
# Time without the management NIC; long enough to tell a frozen engine from a busy machine.
AWAY_S = 3.0
# Polling interval, and thus the error of observed times such as a rail's return.
POLL_S = 0.02
AIM_TIMEOUT_S = 10.0
# Time to wait for traffic on a rail other than the rail struck last.
PREFER_S = 2.0
# A stall beginning later than this after a replay has another cause than the replay.
REPLAY_ARRIVES_NS = 50_000_000
# A port event between two collectives stalls no collective; the fault is then repeated.
MAX_STRIKES = 6


class FaultError(RuntimeError):
    """The planned fault cannot be made; the text names the reason."""


class EngineInjector:
    """Makes faults inside the engine, for a machine without a lab, by lines in R2CCL_FAULT_FILE.

    All nodes read the file, so a fault hits the rail with this index on every node. rails: number
    of rails.
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
            raise ValueError("rail is None: must be an index; the engine has no management NIC")
        with self._path.open("a", encoding="ascii") as file:
            file.write(f"{rail} {word}\n")


@dataclass(frozen=True)
class Cost:
    """Cost of a fault, from the workers' journals."""

    stalls: int
    stall_ms_max: float
    replayed_chunks: int
    hedged_chunks: int


def cost_of(events: Sequence[journal.Event], rail: int) -> Cost:
    """Sums up the cost of a fault on this rail. Replayed chunks include hedged chunks.

    A stall counts only if chunks were replayed from this rail at the time. Other stalls may come
    from a late peer, which is common on a busy machine.
    """
    moves = [
        event
        for event in events
        if event.kind in ("replay", "hedge") and event.rail.startswith(f"rail{rail}@")
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


class RailInUse:
    """Determines the rail in use before and during a fault, from readings of sent bytes.

    rail, bytes_before: the faulted rail, and the bytes of the last step before the fault.
    rail_after: the rail in use during the fault; None = unknown. The first reading is NOTICE_S
    after the fault, the second WATCH_S later. Without traffic in between, e.g. in a pause of
    decoding, further readings follow.
    """

    def __init__(self, sent_bytes: Callable[[], Counter[int]]) -> None:
        self.rail = 0
        self.bytes_before = 0
        self.rail_after: int | None = None
        self._sent_bytes = sent_bytes
        self._first: Counter[int] | None = None
        self._due_s = NOTICE_S

    def seen(self, since_s: float) -> bool:
        """Takes a reading if due; returns True once rail_after is known.

        since_s: time since the fault, s.
        """
        if self.rail_after is None and since_s >= self._due_s:
            now = self._sent_bytes()
            if self._first is None:
                self._first, self._due_s = now, since_s + WATCH_S
            elif used := busiest_rail(self._first, now):
                self.rail_after, _ = used
        return self.rail_after is not None


class Striker:
    """Makes the demo's faults in sequence; ``played`` has the last attempt of each fault of a rail.

    step_s: length of a decode step, s. decoding: returns True while more tokens are expected.
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
        """Faults the rail in use, repeated until a collective stalls; returns rail and report.

        avoid: a rail to strike only if no other rail comes into use within PREFER_S. Raises
        FaultError if no rail is in use, or if decoding ends first.
        """
        for missed in range(MAX_STRIKES):
            played, report = self._strike_once(kind, node, avoid)
            report.missed_strikes = missed
            if (report.stalls and report.replayed_chunks) or missed == MAX_STRIKES - 1:
                break
            self._watch(f"{kind} on {report.rail} stalled no collective; repeating the fault")
        self.played.append(played)
        return played.rails[0], report

    def management(self, node: int) -> Played:
        """Takes the carrier of a node's management NIC for AWAY_S.

        Raises FaultError if decoding ends meanwhile.
        """
        name = f"mgmt@node{node}"
        player = Player(
            [Fault(0.0, "carrier_loss", node, Aim.MANAGEMENT, AWAY_S)],
            self._injector,
            seconds=AWAY_S,
            watch=self._watch,
            text_of=lambda _: f"carrier_loss on {name}",
        )
        player.play()
        if not self._decoding():
            raise FaultError(f"decoding ended before the carrier_loss fault on {name} was over")
        self._watch(f"carrier_loss on {name}: healed")
        (played,) = player.played
        return played

    def _strike_once(self, kind: str, node: int, avoid: int | None) -> tuple[Played, FaultReport]:
        played, in_use = self._play(kind, node, avoid)
        assert played.healed_ns is not None
        events = self._journals.events(played.struck_ns, played.healed_ns)
        cost, back_ns = cost_of(events, in_use.rail), played.back_ns
        name, after = _name(in_use.rail, node), in_use.rail_after
        self._watch(f"{kind} on {name}: stalled {cost.stall_ms_max:.1f} ms; healed")
        report = FaultReport(
            kind=kind,
            rail=name,
            bytes_before=in_use.bytes_before,
            replayed_chunks=cost.replayed_chunks,
            hedged_chunks=cost.hedged_chunks,
            rail_after="" if after is None else _name(after, node),
            stall_ms_max=cost.stall_ms_max,
            stalls=cost.stalls,
            missed_strikes=0,
            rejoin_ms=None if back_ns is None else (back_ns - played.healed_ns) / 1e6,
        )
        return played, report

    def _play(self, kind: str, node: int, avoid: int | None) -> tuple[Played, RailInUse]:
        """Plays a fault, from the choice of the rail until all rails are UP again."""
        in_use = RailInUse(self._journals.sent_bytes)

        def aim() -> int:
            in_use.rail, in_use.bytes_before = self._aim(kind, avoid)
            return in_use.rail

        def attend() -> None:
            for played in player.played:
                since_s = (time.monotonic_ns() - played.struck_ns) / 1e9
                if played.healed_ns is None and in_use.seen(since_s):
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
            text_of=lambda _: f"{kind} on {_name(in_use.rail, node)}",
        )
        player.play()
        (played,) = player.played
        return played, in_use

    def _aim(self, kind: str, avoid: int | None) -> tuple[int, int]:
        """Returns the rail of the last step and the bytes sent; prefers rails other than `avoid`.

        Raises FaultError if decoding has ended, or after AIM_TIMEOUT_S without traffic.
        """
        began = time.monotonic()
        while time.monotonic() < began + AIM_TIMEOUT_S:
            if not self._decoding():
                raise FaultError(f"decoding ended before the {kind} fault could be made")
            used = self._use_now()
            if used is not None and (used[0] != avoid or time.monotonic() > began + PREFER_S):
                return used
        raise FaultError(
            f"no rail for the {kind} fault: no rail had traffic for {AIM_TIMEOUT_S:.0f} s"
        )

    def _use_now(self) -> tuple[int, int] | None:
        before = self._journals.sent_bytes()
        time.sleep(self._step_s)
        return busiest_rail(before, self._journals.sent_bytes())


def _name(rail: int, node: int) -> str:
    return f"rail{rail}@node{node}"
