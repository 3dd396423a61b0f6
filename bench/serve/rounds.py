"""Rounds: the clients' view of an engine's steps, as tokens that arrive together."""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from r2serve.lab.serving.client import Run

TOGETHER_NS = 3_000_000
"""Maximum gap between consecutive tokens of a round, in ns."""
AROUND = 8
"""Number of rounds before a round, and after a round, that form the round's baseline."""
CATCHES_UP = 0.5
"""Tokens of a round shorter than this fraction of the baseline were delayed on the way."""


RoundKind = tuple[bool, bool]
_DECODE: RoundKind = (False, False)


@dataclass(frozen=True)
class Round:
    """Tokens that arrived together. Times are CLOCK_MONOTONIC, in ns.

    began_ns: arrival of the previous round; after an idle engine, the due time of the first
    request. kind: whether the round has first tokens, and whether the engine was idle before.
    Rounds of the same kind have similar durations. steps: the largest number of tokens of a single
    request. requests: indices of the requests with tokens in the round.
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
    """Returns the rounds of a run, in order of arrival."""
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
    """Baseline duration of a round: the median of surrounding rounds of the same kind.

    Rounds with a stall do not count. Without any surrounding round of the kind, rounds of the
    undisturbed run are used.
    """

    def __init__(
        self, found: Sequence[Round], held: Collection[int], undisturbed: Sequence[Round]
    ) -> None:
        self._rounds = found
        self._alike: dict[RoundKind, list[int]] = defaultdict(list)
        """Indices of the rounds usable for a baseline, by kind."""
        for index, each in enumerate(found):
            if index not in held and each.steps == 1:
                self._alike[each.kind].append(index)
        self._undisturbed = undisturbed

    def ns(self, index: int) -> float:
        """Returns the baseline of a round; all steps after the first step are decode steps."""
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
        """Returns True if the round's tokens were delayed on the way: the round is much too short.

        The round must have further tokens of a request of the previous round.
        """
        this, before = self._rounds[index], self._rounds[index - 1]
        again = not this.requests.isdisjoint(before.requests)
        return again and this.took_ns < CATCHES_UP * self.ns(index)


def jitter_ms(undisturbed: Run) -> float | None:
    """Returns the 95th percentile of a round's deviation from its baseline, in ms.

    ``undisturbed`` is a run without faults; None without comparable rounds. For a single stall, an
    agreement closer than the jitter is a coincidence.
    """
    found = rounds(undisturbed)
    usual = RoundBaseline(found, (), ())
    apart = sorted(
        abs(usual.late_ns(index)) / 1e6
        for index, each in enumerate(found)
        if each.steps == 1 and usual.ns(index) > 0
    )
    return round(apart[int(0.95 * len(apart))], 3) if apart else None
