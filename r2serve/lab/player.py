"""Plays a schedule of faults on a lab and notes when what happened."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from r2serve.lab.kinds import KINDS
from r2serve.lab.lab import Lab
from r2serve.lab.schedule import Aim, Fault, Schedule

POLL_S = 0.1
# How often the workers' rails are looked at, and over how long their traffic.
LOOK_S = 0.2
TRAFFIC_S = 0.3
AIM_TIMEOUT_S = 5.0
REJOIN_TIMEOUT_S = 30.0


class Rails(Protocol):
    """What the workers' journals say about the rails between nodes."""

    def down(self) -> set[int] | None:
        """Rails that are not UP; None while no worker has any."""
        ...

    def sent_bytes(self) -> Counter[int]:
        """Bytes of messages sent so far, by rail."""
        ...


@dataclass
class Played:
    """One fault as it was played.

    rails: which it took. late_s: how long it waited for its rail to be UP. Times are
    CLOCK_MONOTONIC in ns: struck, healed, and every rail UP again; None: has not happened.
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
    action: str


class Player:
    """Plays one schedule.

    attend: called several times a second while it plays; what it raises ends the play, with
    everything healed. watch: is told what happens, a line each.
    """

    def __init__(
        self,
        schedule: Schedule,
        lab: Lab,
        rails: Rails,
        attend: Callable[[], None],
        watch: Callable[[str], None],
    ) -> None:
        self._schedule = schedule
        self._lab = lab
        self._rails = rails
        self._attend = attend
        self._watch = watch
        self._begun_s = 0.0
        self._looked_s = 0.0
        self._turns: list[_Turn] = []
        self._there: set[int] = set()
        self._of_index: dict[int, Played] = {}

    @property
    def played(self) -> list[Played]:
        """What has struck so far, in that order."""
        return list(self._of_index.values())

    def play(self) -> bool:
        """Plays it all; returns whether all rails were UP again REJOIN_TIMEOUT_S after the end."""
        self._begun_s = time.monotonic()
        faults = self._schedule.faults
        self._turns = [_Turn(fault.at_s, index, "strike") for index, fault in enumerate(faults)]
        heapq.heapify(self._turns)
        try:
            while self._turns:
                turn = heapq.heappop(self._turns)
                self._wait(self._begun_s + turn.at_s)
                self._take(turn)
            self._wait(self._begun_s + self._schedule.seconds)
        finally:
            for index in sorted(self._there):
                self._undo(index)
        back = self._wait_for(lambda down: not down, REJOIN_TIMEOUT_S)
        self._look()
        return back

    def _take(self, turn: _Turn) -> None:
        index, fault = turn.index, self._schedule.faults[turn.index]
        cycle_s = KINDS[fault.kind].cycle_s
        if turn.action == "strike":
            self._begin(index)
            heapq.heappush(self._turns, _Turn(fault.end_s, index, "end"))
        elif turn.action == "again":
            self._make(index)
        else:
            self._undo(index)
        if turn.action == "end":
            self._of_index[index].healed_ns = time.monotonic_ns()
        elif cycle_s is not None:
            there = turn.action != "pause"
            at_s = turn.at_s + cycle_s[0 if there else 1]
            if at_s < fault.end_s:
                heapq.heappush(self._turns, _Turn(at_s, index, "pause" if there else "again"))

    def _begin(self, index: int) -> None:
        """Strikes as soon as a rail is there that can be lost; all that follows is as much later.

        A fault that stands alone waits for all rails; a second one for its own.
        """
        fault, asked_s = self._schedule.faults[index], time.monotonic()
        second = self._schedule.is_second(index)
        if second and isinstance(fault.rail, int):
            own = fault.rail
            self._wait_for(lambda down: own not in down, REJOIN_TIMEOUT_S)
        else:
            self._wait_for(lambda down: not down, REJOIN_TIMEOUT_S)
        rails = self._aim(fault)
        late_s = time.monotonic() - asked_s
        self._begun_s += late_s
        label = self._schedule.label(index)
        names = ", ".join(f"rail{rail}" for rail in rails)
        self._watch(f"{label} at node {fault.node}, {names}, for {fault.duration_s:g} s")
        played = Played(label, fault, rails, late_s, time.monotonic_ns())
        self._of_index[index] = played
        self._make(index)

    def _make(self, index: int) -> None:
        played = self._of_index[index]
        self._there.add(index)
        for rail in played.rails:
            KINDS[played.fault.kind].make(self._lab, played.fault.node, rail)

    def _undo(self, index: int) -> None:
        if index in self._there:
            played = self._of_index[index]
            for rail in played.rails:
                KINDS[played.fault.kind].undo(self._lab, played.fault.node, rail)
            self._there.discard(index)

    def _aim(self, fault: Fault) -> tuple[int, ...]:
        every = range(self._schedule.rails)
        if fault.rail is Aim.ALL:
            return tuple(every)
        if isinstance(fault.rail, int):
            return (fault.rail,)
        best = max if fault.rail is Aim.IN_USE else min
        deadline = time.monotonic() + AIM_TIMEOUT_S
        while True:
            before = self._rails.sent_bytes()
            self._wait(time.monotonic() + TRAFFIC_S)
            after = self._rails.sent_bytes()
            moved = {rail: after[rail] - before[rail] for rail in every}
            if any(moved.values()) or time.monotonic() > deadline:
                return (best(every, key=lambda rail: moved[rail]),)

    def _wait(self, until_s: float) -> None:
        while True:
            self._attend()
            if time.monotonic() - self._looked_s >= LOOK_S:
                self._look()
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return
            time.sleep(min(left_s, POLL_S))

    def _wait_for(self, right: Callable[[set[int]], bool], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while True:
            down = self._rails.down()
            if down is not None and right(down):
                return True
            if time.monotonic() > deadline:
                return False
            self._wait(time.monotonic() + POLL_S)

    def _look(self) -> None:
        """Notes whose fault is over: healed, and all rails UP."""
        self._looked_s = time.monotonic()
        waiting = [
            played
            for played in self._of_index.values()
            if played.healed_ns is not None and played.back_ns is None
        ]
        if waiting and self._rails.down() == set():
            for played in waiting:
                played.back_ns = time.monotonic_ns()
