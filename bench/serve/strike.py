"""Plays a schedule's faults on a lab while requests are under way."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from r2serve.bench.serve.scenarios import AIM_S, WORDS, Fault
from r2serve.lab.holder import LabCommandError
from r2serve.lab.kinds import KINDS
from r2serve.lab.lab import Lab


@dataclass
class Struck:
    """A fault as it was made, in CLOCK_MONOTONIC ns. healed_ns: None while it is there."""

    fault: Fault
    rails: tuple[int, ...]  # none: the management NIC
    struck_ns: int
    healed_ns: int | None = None


@dataclass(order=True)
class _Turn:
    at_s: float
    index: int
    action: str  # aim, strike, end, pause, again


class Strikes:
    """Makes faults on a thread of its own, and undoes all of them when it is left.

    What makes a fault on the machine that serves takes processor time, which no fault of a network
    does: what can be done before is done ``AIM_S`` before.

    begun_ns: CLOCK_MONOTONIC of the first request, which times count from; 0 while it is awaited.
    aim: which rail of a node carries most. watch: is told what is about to happen, a line each.
    What goes wrong on the thread is raised on leaving.
    """

    def __init__(
        self,
        lab: Lab,
        faults: Sequence[Fault],
        begun_ns: Callable[[], int],
        aim: Callable[[], int],
        watch: Callable[[str], None],
    ) -> None:
        self._lab = lab
        self._faults = faults
        self._begun_ns = begun_ns
        self._aim = aim
        self._watch = watch
        self._over = threading.Event()
        self._error: LabCommandError | OSError | None = None
        self._there: set[int] = set()
        self._aimed: dict[int, tuple[int, ...]] = {}
        self._of_index: dict[int, Struck] = {}
        self._thread = threading.Thread(target=self._run, name="bench-faults")

    @property
    def struck(self) -> list[Struck]:
        """What has struck so far, in that order."""
        return list(self._of_index.values())

    def __enter__(self) -> Strikes:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while not self._begun_ns() and not self._over.wait(0.01):
            pass
        begun_s = self._begun_ns() / 1e9
        turns = [
            _Turn(max(0.0, fault.at_s - AIM_S), index, "aim")
            for index, fault in enumerate(self._faults)
        ]
        heapq.heapify(turns)
        try:
            while turns and not self._over.is_set():
                turn = heapq.heappop(turns)
                if self._over.wait(max(0.0, begun_s + turn.at_s - time.monotonic())):
                    break
                self._take(turn, turns)
            self._over.wait()
        except (LabCommandError, OSError) as error:
            self._error = error
        finally:
            for index in sorted(self._there):
                self._change(index, there=False)

    def _take(self, turn: _Turn, turns: list[_Turn]) -> None:
        fault = self._faults[turn.index]
        if turn.action == "aim":
            self._aimed[turn.index] = self._rails(fault)
            self._watch(str(fault))
            heapq.heappush(turns, _Turn(fault.at_s, turn.index, "strike"))
            return
        if turn.action == "strike":
            rails = self._aimed[turn.index]
            self._of_index[turn.index] = Struck(fault, rails, time.monotonic_ns())
            if fault.for_s is not None:
                heapq.heappush(turns, _Turn(fault.end_s, turn.index, "end"))
        there = turn.action in ("strike", "again")
        self._change(turn.index, there=there)
        if turn.action != "end" and fault.cycle_s is not None:
            at_s = turn.at_s + fault.cycle_s[0 if there else 1]
            if at_s < fault.end_s:
                heapq.heappush(turns, _Turn(at_s, turn.index, "pause" if there else "again"))

    def _rails(self, fault: Fault) -> tuple[int, ...]:
        if fault.where == "mgmt":
            return ()
        if fault.where == "all":
            return tuple(range(self._lab.rails))
        if fault.where == "used":
            return (self._aim(),)
        return (int(fault.where.removeprefix("rail")),)

    def _change(self, index: int, *, there: bool) -> None:
        fault, struck = self._faults[index], self._of_index[index]
        (self._there.add if there else self._there.discard)(index)
        kind = KINDS[WORDS[fault.word]]
        for rail in struck.rails:
            (kind.make if there else kind.undo)(self._lab, fault.node, rail)
        if fault.where == "mgmt":
            state = "down" if there else "up"
            self._lab.run_in_switch("ip", "link", "set", f"n{fault.node}m", state)
        struck.healed_ns = None if there else time.monotonic_ns()
