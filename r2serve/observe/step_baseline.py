"""How long steps take that nothing holds up: what one that was held up is compared with."""

from __future__ import annotations

import statistics
from collections import deque
from itertools import combinations

USUAL_OF = 16
"""So many steps tell how long one usually takes, from a quarter of them on."""
FARTHEST = 2
"""Nothing is said of steps of so many times more, or fewer, tokens than any that was seen."""


class StepBaseline:
    """Of the last steps of one worker.

    Steps of one token a request take about as long as one another; others as long as a line says,
    by their tokens.
    """

    def __init__(self) -> None:
        self._alike: deque[int] = deque(maxlen=USUAL_OF)
        self._others: deque[tuple[int, int]] = deque(maxlen=USUAL_OF)

    def note(self, took_ns: int, tokens: int, *, one_each: bool) -> None:
        """A step that was not held up."""
        if one_each:
            self._alike.append(took_ns)
        elif tokens > 0:
            self._others.append((tokens, took_ns))

    def ns(self, tokens: int, *, one_each: bool) -> int:
        """What such a step takes; 0: unknown."""
        if one_each:
            enough = len(self._alike) >= USUAL_OF // 4
            return int(statistics.median(self._alike)) if enough else 0
        seen = [count for count, _ in self._others]
        if len(seen) < USUAL_OF // 4:
            return 0
        if not min(seen) <= tokens * FARTHEST or not tokens <= max(seen) * FARTHEST:
            return 0
        # Nobody knows how the line goes on.
        return max(0, int(self._line(min(max(tokens, min(seen)), max(seen)))))

    def _line(self, tokens: int) -> float:
        """Through the others, by Theil and Sen: a few that took long for once do not bend it."""
        slopes = [
            (late_ns - early_ns) / (more - fewer)
            for (fewer, early_ns), (more, late_ns) in combinations(self._others, 2)
            if more != fewer
        ]
        slope = max(0.0, statistics.median(slopes)) if slopes else 0.0
        return slope * tokens + statistics.median(ns - slope * n for n, ns in self._others)
