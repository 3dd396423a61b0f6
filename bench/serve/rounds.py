"""What clients saw of an engine's steps: tokens that came to them together."""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from r2serve.lab.serving.client import Run

TOGETHER_NS = 3_000_000
"""Tokens that come one after the other within that time come together."""
AROUND = 8
"""So many rounds before and after one tell what is usual there."""
CATCHES_UP = 0.5
"""A round so much shorter than usual brings what was held up on its way to the clients."""


RoundKind = tuple[bool, bool]
_DECODE: RoundKind = (False, False)


@dataclass(frozen=True)
class Round:
    """Tokens that came together, in CLOCK_MONOTONIC ns.

    began_ns: when the round before came; where nothing was under way then, when the first request
    was due. kind: whether there are first tokens among them, and whether the engine idled before:
    rounds of a kind take about as long as one another. steps: so many tokens of one request.
    requests: whose tokens they are.
    """

    began_ns: int
    came_ns: int
    kind: RoundKind
    steps: int = 1
    requests: frozenset[int] = frozenset()

    @property
    def took_ns(self) -> int:
        return self.came_ns - self.began_ns


def rounds(run: Run) -> list[Round]:
    """In the order in which they came."""
    arrivals = sorted(
        (time_ns, index, number)
        for index, request in enumerate(run.requests)
        for number, time_ns in enumerate(request.times_ns)
    )
    groups: list[list[tuple[int, int, int]]] = []
    for arrival in arrivals:
        if not groups or arrival[0] - groups[-1][-1][0] > TOGETHER_NS:
            groups.append([])
        groups[-1].append(arrival)
    found: list[Round] = []
    before_ns = 0
    for group in groups:
        came_ns = group[0][0]
        due_ns = min(
            request.sent_ns
            for request in run.requests
            if request.times_ns and request.sent_ns < came_ns <= request.times_ns[-1]
        )
        of_request = [index for _, index, _ in group]
        found.append(
            Round(
                began_ns=max(before_ns, due_ns),
                came_ns=came_ns,
                kind=(any(number == 0 for *_, number in group), due_ns >= before_ns),
                steps=max(map(of_request.count, of_request)),
                requests=frozenset(of_request),
            )
        )
        before_ns = came_ns
    return found


class RoundBaseline:
    """What rounds of a run take that nothing held up, by those around them.

    Where there are none of their kind, by those of the undisturbed run.
    """

    def __init__(
        self, found: Sequence[Round], held: Collection[int], undisturbed: Sequence[Round]
    ) -> None:
        self._rounds = found
        self._alike: dict[RoundKind, list[int]] = defaultdict(list)
        """The indices of those that can be compared with."""
        for index, each in enumerate(found):
            if index not in held and each.steps == 1:
                self._alike[each.kind].append(index)
        self._undisturbed = undisturbed

    def ns(self, index: int) -> float:
        """What the round of that index usually takes; of several steps, the others decode."""
        this = self._rounds[index]
        one = self._step_ns(index, this.kind)
        return one + (this.steps - 1) * self._step_ns(index, _DECODE) if this.steps > 1 else one

    def _step_ns(self, index: int, kind: RoundKind) -> float:
        alike = self._alike[kind]
        at, behind = bisect_left(alike, index), bisect_right(alike, index)
        near = alike[max(0, at - AROUND) : at] + alike[behind : behind + AROUND]
        took = [self._rounds[other].took_ns for other in near]
        took = took or [each.took_ns for each in self._undisturbed if each.kind == kind]
        return statistics.median(took) if took else 0.0

    def late_ns(self, index: int) -> float:
        return self._rounds[index].took_ns - self.ns(index)

    def catches_up(self, index: int) -> bool:
        """It brings what was held up on its way: the next tokens of requests, far too soon."""
        this, before = self._rounds[index], self._rounds[index - 1]
        again = not this.requests.isdisjoint(before.requests)
        return again and this.took_ns < CATCHES_UP * self.ns(index)


def jitter_ms(undisturbed: Run) -> float | None:
    """By how much a round differs from those around it, where nothing is struck.

    19 of 20 differ by less; None: there are too few. An agreement to less than that of a single
    stall is luck.
    """
    found = rounds(undisturbed)
    usual = RoundBaseline(found, (), ())
    apart = sorted(
        abs(usual.late_ns(index)) / 1e6
        for index, each in enumerate(found)
        if each.steps == 1 and usual.ns(index) > 0
    )
    return round(apart[int(0.95 * len(apart))], 3) if apart else None
