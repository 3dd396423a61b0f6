"""Baseline of a worker's step durations, to measure the delay of stalled steps."""

from __future__ import annotations

import statistics
from collections import deque
from itertools import combinations

USUAL_OF = 16
"""Window size of the baseline, in steps; at least a quarter of the window is required."""
FARTHEST = 2
"""Token counts outside the observed range by more than this factor have no baseline."""


class StepBaseline:
    """Estimates the duration of a step from the last steps of the same worker without stalls.

    Pure decode steps (1 token per request) use the median. Other steps use a Theil-Sen line of
    duration over token count.
    """

    def __init__(self) -> None:
        self._alike: deque[int] = deque(maxlen=USUAL_OF)
        self._others: deque[tuple[int, int]] = deque(maxlen=USUAL_OF)

    def note(self, took_ns: int, tokens: int, *, one_each: bool) -> None:
        """Records a step without stalls. one_each: True for a pure decode step."""
        if one_each:
            self._alike.append(took_ns)
        elif tokens > 0:
            self._others.append((tokens, took_ns))

    def ns(self, tokens: int, *, one_each: bool) -> int:
        """Returns the expected duration of a step, ns; 0 = unknown."""
        if one_each:
            enough = len(self._alike) >= USUAL_OF // 4
            return int(statistics.median(self._alike)) if enough else 0
        seen = [count for count, _ in self._others]
        if len(seen) < USUAL_OF // 4:
            return 0
        if not min(seen) <= tokens * FARTHEST or not tokens <= max(seen) * FARTHEST:
            return 0
        # Clamp the token count: the line is not extrapolated beyond the observed range.
        return max(0, int(self._line(min(max(tokens, min(seen)), max(seen)))))

    def _line(self, tokens: int) -> float:
        """Evaluates the Theil-Sen line of the non-decode steps, which is robust to outliers."""
        slopes = [
            (late_ns - early_ns) / (more - fewer)
            for (fewer, early_ns), (more, late_ns) in combinations(self._others, 2)
            if more != fewer
        ]
        slope = max(0.0, statistics.median(slopes)) if slopes else 0.0
        return slope * tokens + statistics.median(ns - slope * n for n, ns in self._others)
