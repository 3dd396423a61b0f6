"""How much slower requests are in one of two states that take turns: ratios with intervals.

The machine's speed drifts by more between two runs than many an effect is large, and by little
within seconds.  So the state changes every few seconds, and each window is compared with the two
beside it.
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
"""A window with fewer whole requests has no value."""
LEAST_COMPARED = 8
"""Fewer comparisons make no interval."""
TRIMMED = 0.1
"""Of the comparisons at either end: those that something else on the machine held up."""
BLOCK = 4
"""Comparisons that are drawn together: neighbours share windows, so they depend on each other."""
DRAWN = 4000
CONFIDENCE = 0.95


class AlternationError(ValueError):
    """What was measured makes no comparison; the text says what would."""


@dataclass(frozen=True)
class StateWindow:
    """A time in one state.  ``changed``: the state that is compared with the usual one."""

    begin_ns: int
    end_ns: int
    changed: bool


@dataclass(frozen=True)
class TimeRatio:
    """The changed state's time over the usual state's, with a 95 % interval from low to high."""

    ratio: float
    low: float
    high: float
    compared: int
    """Windows that were compared with the two beside them."""

    def __str__(self) -> str:
        return f"{self.ratio:.4f} (95 %: {self.low:.4f} to {self.high:.4f})"


@dataclass(frozen=True)
class Compared:
    """All that a run of windows says.

    requests: those that count.  straddled: those that lie in no window as a whole, or overlap with
    one that does not.
    """

    tpot: TimeRatio
    e2e: TimeRatio
    windows: int
    requests: int
    straddled: int


def windows_of(begin_ns: int, switched_ns: Sequence[int], end_ns: int) -> list[StateWindow]:
    """The windows between switches; the first one is of the usual state.

    All times are CLOCK_MONOTONIC.  Raises AlternationError where the switches are in no order.
    """
    edges = [begin_ns, *switched_ns, end_ns]
    if any(later <= earlier for earlier, later in itertools.pairwise(edges)):
        raise AlternationError("switches are not in the order of their times")
    return [
        StateWindow(begin, end, changed=bool(index % 2))
        for index, (begin, end) in enumerate(itertools.pairwise(edges))
    ]


def whole(requests: Iterable[Request], windows: Sequence[StateWindow]) -> list[list[Request]]:
    """By window, the requests that lie in it as a whole, and beside none that came before it.

    Requests that are under way at a switch would measure both states, and those beside them share
    the engine with them.
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
    """TPOT and end-to-end latency of the changed state against the usual one.

    Raises AlternationError where too few windows have requests.
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
    """Of windows in their order; None: the window has no value.

    Each window is compared with the mean of the two beside it, in logarithms: a steady drift goes
    out.  The ratio is the trimmed mean, the interval a moving-block bootstrap's.

    Raises AlternationError where fewer than ``LEAST_COMPARED`` can be compared.
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
            f"{len(compared)} windows can be compared with both beside them; at least "
            f"{LEAST_COMPARED} are needed: more alternations, longer windows or shorter requests"
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
    """Means over the last axis, without the highest and the lowest ``TRIMMED`` of the values."""
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
