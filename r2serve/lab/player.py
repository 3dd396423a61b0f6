"""Plays faults at scheduled times and records the actual times."""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from r2serve.lab.injector import Injector
from r2serve.lab.kinds import KINDS
from r2serve.lab.schedule import Aim, Fault, is_second, label_of

POLL_S = 0.1
# Polling interval of the workers' rails, and measuring time of the traffic.
LOOK_S = 0.2
TRAFFIC_S = 0.3
AIM_TIMEOUT_S = 5.0
REJOIN_TIMEOUT_S = 30.0


class Rails(Protocol):
    """State of the rails between nodes, as seen by the workers."""

    def down(self) -> set[int] | None:
        """Returns the rails not UP; None while no worker has any rail."""
        ...

    def sent_bytes(self) -> Counter[int]:
        """Returns the message bytes sent so far, by rail."""
        ...


@dataclass
class Played:
    """Record of a played fault.

    rails: the rails hit; empty = the management NIC. late_s: wait for the rail to be UP before the
    strike, s. Times are CLOCK_MONOTONIC in ns: struck_ns, healed_ns, and back_ns (all rails UP
    again). None = not yet.
    """

    label: str
    fault: Fault
    rails: tuple[int, ...]
    late_s: float
    struck_ns: int
    healed_ns: int | None = None
    back_ns: int | None = None


@dataclass(order=True)
class _Turn:
    at_s: float
    index: int
    action: str  # aim, strike, end, pause, again


class Player:
    """Plays a time-ordered list of faults.

    injector: makes and undoes the faults.
    seconds: length of the play; by default, the play lasts until ``over`` is set.
    rails: if given, a fault waits for the rail to be UP, later faults are delayed by the same time,
        and the return of all rails is recorded.
    aim: returns a node's busiest rail; by default, the player measures the traffic of ``rails``.
    ahead_s: lead time before a fault, s. The player chooses the rail and calls ``watch`` this much
        earlier, because both take CPU time.
    attend: called every ``poll_s`` s; an exception ends the play and heals all faults.
    watch: called with a text line per fault.

    over: an event for any thread to end the play; all faults are then healed.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        injector: Injector,
        *,
        seconds: float = math.inf,
        rails: Rails | None = None,
        aim: Callable[[], int] | None = None,
        ahead_s: float = 0.0,
        attend: Callable[[], None] | None = None,
        poll_s: float = POLL_S,
        watch: Callable[[str], None] = lambda _: None,
        text_of: Callable[[Fault], str] | None = None,
    ) -> None:
        measured = {Aim.IDLE} if aim is not None else {Aim.IDLE, Aim.IN_USE}
        if rails is None and any(fault.rail in measured for fault in faults):
            raise ValueError("rails: must be given, because the player has to measure traffic")
        self.over = threading.Event()
        self._faults = faults
        self._injector = injector
        self._seconds = seconds
        self._rails = rails
        self._aim = aim
        self._ahead_s = ahead_s
        self._attend = attend
        self._poll_s = poll_s
        self._watch = watch
        self._text_of = text_of
        self._begun_s = 0.0
        self._looked_s = 0.0
        self._turns: list[_Turn] = []
        self._there: set[int] = set()
        self._aimed: dict[int, tuple[tuple[int, ...], float]] = {}
        self._of_index: dict[int, Played] = {}

    @property
    def played(self) -> list[Played]:
        """The faults played so far, in order of their strikes."""
        return list(self._of_index.values())

    def play(self, begun_s: float | None = None) -> bool:
        """Plays all faults; returns True if all rails are UP within REJOIN_TIMEOUT_S of the end.

        begun_s: time origin of the faults, CLOCK_MONOTONIC in s; default: now.
        """
        self._begun_s = time.monotonic() if begun_s is None else begun_s
        self._turns = [
            _Turn(max(0.0, fault.at_s - self._ahead_s), index, "aim")
            for index, fault in enumerate(self._faults)
        ]
        heapq.heapify(self._turns)
        try:
            while self._turns:
                turn = heapq.heappop(self._turns)
                if not self._wait(self._begun_s + turn.at_s):
                    break
                self._take(turn)
            self._wait(self._begun_s + self._seconds)
        finally:
            for index, played in self._of_index.items():
                if played.healed_ns is None:
                    self._end(index)
        back = self._wait_for(lambda down: not down, at_end=True)
        self._look()
        return back

    def _take(self, turn: _Turn) -> None:
        index, fault = turn.index, self._faults[turn.index]
        if turn.action == "aim":
            self._prepare(index)
            heapq.heappush(self._turns, _Turn(fault.at_s, index, "strike"))
            return
        if turn.action == "end":
            self._end(index)
            return
        if turn.action == "strike":
            rails, late_s = self._aimed[index]
            label = label_of(self._faults, index)
            if math.isfinite(fault.end_s):
                heapq.heappush(self._turns, _Turn(fault.end_s, index, "end"))
            self._of_index[index] = Played(label, fault, rails, late_s, time.monotonic_ns())
        there = turn.action in ("strike", "again")
        self._change(index, there=there)
        cycle_s = KINDS[fault.kind].cycle_s
        if cycle_s is not None:
            at_s = turn.at_s + cycle_s[0 if there else 1]
            if at_s < fault.end_s:
                heapq.heappush(self._turns, _Turn(at_s, index, "pause" if there else "again"))

    def _prepare(self, index: int) -> None:
        """Chooses the rails of a fault, after waiting for UP rails if rails are watched.

        A fault normally waits for all rails; a second fault on a given rail only for this rail, and
        on the management NIC for none.
        """
        fault, asked_s = self._faults[index], time.monotonic()
        if is_second(self._faults, index) and fault.is_exact:
            own = fault.rail
            self._wait_for(lambda down: own not in down)
        else:
            self._wait_for(lambda down: not down)
        rails = self._rails_of(fault)
        late_s = time.monotonic() - asked_s if self._rails is not None else 0.0
        self._begun_s += late_s
        self._aimed[index] = rails, late_s
        if self._text_of is not None:
            self._watch(self._text_of(fault))
        else:
            names = ", ".join(f"rail{rail}" for rail in rails) or "management NIC"
            label = label_of(self._faults, index)
            self._watch(f"{label} at node {fault.node}, {names}, for {fault.duration_s:g} s")

    def _change(self, index: int, *, there: bool) -> None:
        (self._there.add if there else self._there.discard)(index)
        fault, rails = self._of_index[index].fault, self._of_index[index].rails
        change = self._injector.make if there else self._injector.undo
        for rail in rails or (None,):
            change(fault.kind, fault.node, rail)

    def _end(self, index: int) -> None:
        if index in self._there:
            self._change(index, there=False)
        self._of_index[index].healed_ns = time.monotonic_ns()

    def _rails_of(self, fault: Fault) -> tuple[int, ...]:
        every = range(self._injector.rails)
        if fault.rail is Aim.MANAGEMENT:
            return ()
        if fault.rail is Aim.ALL:
            return tuple(every)
        if isinstance(fault.rail, int):
            return (fault.rail,)
        if self._aim is not None and fault.rail is Aim.IN_USE:
            return (self._aim(),)
        best = max if fault.rail is Aim.IN_USE else min
        moved = self._traffic(every)
        return (best(every, key=lambda rail: moved[rail]),)

    def _traffic(self, every: Sequence[int]) -> dict[int, int]:
        """Returns the bytes sent per rail during TRAFFIC_S; waits for the first traffic."""
        assert self._rails is not None, "measuring traffic needs `rails`"
        deadline = time.monotonic() + AIM_TIMEOUT_S
        while True:
            before = self._rails.sent_bytes()
            self._wait(time.monotonic() + TRAFFIC_S)
            after = self._rails.sent_bytes()
            moved = {rail: after[rail] - before[rail] for rail in every}
            if any(moved.values()) or self.over.is_set() or time.monotonic() > deadline:
                return moved

    def _wait(self, until_s: float) -> bool:
        """Waits until a time; returns False if the play was ended by ``over``."""
        while True:
            if self._attend is not None:
                self._attend()
            if self._rails is not None and time.monotonic() - self._looked_s >= LOOK_S:
                self._look()
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return not self.over.is_set()
            if self._attend is not None or self._rails is not None:
                left_s = min(left_s, self._poll_s)
            if self.over.wait(left_s if math.isfinite(left_s) else None):
                return False

    def _wait_for(self, right: Callable[[set[int]], bool], *, at_end: bool = False) -> bool:
        """Waits for a condition on the down rails; returns False after REJOIN_TIMEOUT_S.

        ``over`` also ends the wait, except at the end of the play.
        """
        if self._rails is None:
            return True
        deadline = time.monotonic() + REJOIN_TIMEOUT_S
        while True:
            down = self._rails.down()
            if down is not None and right(down):
                return True
            if time.monotonic() > deadline:
                return False
            if not self._wait(time.monotonic() + self._poll_s):
                if not at_end:
                    return False
                time.sleep(self._poll_s)

    def _look(self) -> None:
        """Records `back_ns` of healed faults once all rails are UP."""
        if self._rails is None:
            return
        self._looked_s = time.monotonic()
        waiting = [
            played
            for played in self._of_index.values()
            if played.healed_ns is not None and played.back_ns is None
        ]
        if waiting and self._rails.down() == set():
            for played in waiting:
                played.back_ns = time.monotonic_ns()
