"""Ratios of request times between two alternating states, with confidence intervals.

Between two runs, the machine's speed often drifts by more than the effect to measure.  Within
seconds, the drift is small.  The state therefore changes every few seconds, and each window is
compared with both neighbouring windows.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from r2serve.lab.serving.client import Request

LEAST_REQUESTS = 2
"""A window needs at least this number of whole requests to have a value."""
LEAST_COMPARED = 8
"""Minimum number of comparisons for an interval."""
TRIMMED = 0.1
"""Fraction of comparisons dropped at each end: other load of the machine delayed these windows."""
BLOCK = 4
"""Consecutive comparisons per bootstrap block; neighbouring comparisons share windows."""
DRAWN = 4000
CONFIDENCE = 0.95


class AlternationError(ValueError):
    """The measurement allows no comparison; the message names the remedy."""


@dataclass(frozen=True)
class StateWindow:
    """A period in a single state.  ``changed``: the changed state, else the usual state."""

    begin_ns: int
    end_ns: int
    changed: bool


@dataclass(frozen=True)
class TimeRatio:
    """Time in the changed state / time in the usual state, with a 95 % interval (low, high)."""

    ratio: float
    low: float
    high: float
    compared: int
    """Number of windows compared with both neighbouring windows."""

    def __str__(self) -> str:
        return f"{self.ratio:.4f} (95 %: {self.low:.4f} to {self.high:.4f})"


@dataclass(frozen=True)
class Compared:
    """Result of a run over all windows.

    requests: number of requests counted.  straddled: number of requests not counted: requests
    under way at a switch, and requests sent beside a request of an earlier window.
    """

    tpot: TimeRatio
    e2e: TimeRatio
    windows: int
    requests: int
    straddled: int


def windows_of(begin_ns: int, switched_ns: Sequence[int], end_ns: int) -> list[StateWindow]:
    """Returns the windows between switches; the first window has the usual state.

    All times are CLOCK_MONOTONIC, in ns.  Raises AlternationError when the switches are not in
    order.
    """
    edges = [begin_ns, *switched_ns, end_ns]
    if any(later <= earlier for earlier, later in itertools.pairwise(edges)):
        raise AlternationError("switch times are not in ascending order")
    return [
        StateWindow(begin, end, changed=bool(index % 2))
        for index, (begin, end) in enumerate(itertools.pairwise(edges))
    ]


def whole(requests: Iterable[Request], windows: Sequence[StateWindow]) -> list[list[Request]]:
    """Returns, for each window, the requests that lie entirely inside the window.

    A request under way at a switch measures both states, and does not count. A request sent while
    such a request is still under way shares the engine, and does not count, either.
    """
    found: list[list[Request]] = [[] for _ in windows]
    clear_ns = [window.begin_ns for window in windows]
    begins = [window.begin_ns for window in windows]
    kept = [each for each in requests if each.completed and len(each.times_ns) > 1]
    for request in kept:
        first = bisect.bisect_right(begins, request.sent_ns) - 1
        last = bisect.bisect_right(begins, request.times_ns[-1]) - 1
        for index in range(first + 1, last + 1):
            clear_ns[index] = max(clear_ns[index], request.times_ns[-1])
    for request in kept:
        index = bisect.bisect_right(begins, request.sent_ns) - 1
        if index < 0:
            continue
        window = windows[index]
        if request.sent_ns >= clear_ns[index] and request.times_ns[-1] <= window.end_ns:
            found[index].append(request)
    return found


def compare(
    requests: Sequence[Request], windows: Sequence[StateWindow], *, seed: int = 0
) -> Compared:
    """Compares TPOT and end-to-end latency of the changed state with the usual state.

    Raises AlternationError when too few windows have requests.
    """
    by_window = whole(requests, windows)
    counted = sum(map(len, by_window))
    changed = [window.changed for window in windows]
    return Compared(
        tpot=ratio(_values(by_window, _tpot_ns), changed, seed=seed),
        e2e=ratio(_values(by_window, _e2e_ns), changed, seed=seed),
        windows=sum(len(each) >= LEAST_REQUESTS for each in by_window),
        requests=counted,
        straddled=len(requests) - counted,
    )


def ratio(values: Sequence[float | None], changed: Sequence[bool], *, seed: int = 0) -> TimeRatio:
    """Returns the ratio of the changed state to the usual state.

    ``values`` has a mean time for each window, in order; None for a window without a value. The
    logarithm of each value is compared with the mean logarithm of both neighbours: a steady drift
    cancels out.  The ratio is the trimmed mean of the comparisons. The interval comes from a
    moving-block bootstrap.

    Raises AlternationError when fewer than ``LEAST_COMPARED`` windows can be compared.
    """
    compared = []
    for index in range(1, len(values) - 1):
        before, value, after = values[index - 1 : index + 2]
        if before is None or value is None or after is None:
            continue
        beside = (math.log(before) + math.log(after)) / 2
        compared.append((math.log(value) - beside) * (1 if changed[index] else -1))
    if len(compared) < LEAST_COMPARED:
        raise AlternationError(
            f"{len(compared)} windows can be compared with both neighbours: must be at least "
            f"{LEAST_COMPARED}; use more alternations, longer windows or shorter requests"
        )
    series = np.array(compared)
    starts = np.random.default_rng(seed).integers(
        0, len(series) - BLOCK + 1, size=(DRAWN, -(-len(series) // BLOCK), 1)
    )
    drawn = series[(starts + np.arange(BLOCK)).reshape(DRAWN, -1)]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(trimmed_mean(drawn), [tail, 1 - tail])
    middle = float(trimmed_mean(series))
    return TimeRatio(math.exp(middle), math.exp(low), math.exp(high), len(compared))


def trimmed_mean(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Returns means over the last axis, without the highest and lowest ``TRIMMED`` of values."""
    ordered = np.sort(values, axis=-1)
    cut = int(ordered.shape[-1] * TRIMMED)
    return np.asarray(ordered[..., cut : ordered.shape[-1] - cut].mean(axis=-1))


def _values(
    by_window: Sequence[Sequence[Request]], of: Callable[[Request], float]
) -> list[float | None]:
    return [
        statistics.fmean(map(of, each)) if len(each) >= LEAST_REQUESTS else None
        for each in by_window
    ]


def _tpot_ns(request: Request) -> float:
    return (request.times_ns[-1] - request.times_ns[0]) / (len(request.times_ns) - 1)


def _e2e_ns(request: Request) -> float:
    return float(request.times_ns[-1] - request.sent_ns)
