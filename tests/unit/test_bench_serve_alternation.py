"""Two alternating states: their comparison, with requests made up here."""

from __future__ import annotations

import math
import random

import pytest

from r2serve.bench.serve.alternation import (
    AlternationError,
    StateWindow,
    compare,
    ratio,
    whole,
    windows_of,
)
from r2serve.lab.serving.client import Request

MS = 1_000_000
SWITCH_MS = 1000.0


def request(sent_ms: float, step_ms: float, tokens: int = 9, first_ms: float = 5.0) -> Request:
    times = [int((sent_ms + first_ms + step_ms * i) * MS) for i in range(tokens)]
    return Request(tuple(range(tokens)), tuple(times), "", True, sent_ns=int(sent_ms * MS))


def windows(count: int) -> list[StateWindow]:
    edges = [int(SWITCH_MS * i * MS) for i in range(count + 1)]
    return windows_of(edges[0], edges[1:-1], edges[-1])


def closed_loop(
    count: int, slower: float, *, noise: float, drift: float, seed: int
) -> list[Request]:
    """Returns consecutive requests; the state at the start of a request sets its speed."""
    source = random.Random(seed)
    made, now_ms, level = [], 0.0, 1.0
    while now_ms < count * SWITCH_MS:
        level *= math.exp(drift * source.gauss(0, 1))
        changed = int(now_ms / SWITCH_MS) % 2
        step_ms = 10 * level * (slower if changed else 1) * math.exp(noise * source.gauss(0, 1))
        made.append(request(now_ms, step_ms))
        now_ms = made[-1].times_ns[-1] / MS
    return made


def test_windows_alternate_and_the_first_is_unchanged() -> None:
    assert [each.changed for each in windows(4)] == [False, True, False, True]
    with pytest.raises(AlternationError, match="order"):
        windows_of(0, [5, 5], 10)


def test_requests_across_a_switch_and_those_beside_are_left_out() -> None:
    straddles = request(900, 20)  # until 1,065 ms
    beside = request(1010, 1)
    after = request(1070, 10)
    before = request(100, 10)
    late = request(1990, 10)  # ends after the last window
    by_window = whole([straddles, beside, after, before, late], windows(2))
    assert by_window == [[before], [after]]


def test_failed_requests_and_one_token_requests_are_left_out() -> None:
    failed = Request((1, 2), (5 * MS, 6 * MS), "lost", False, sent_ns=1)
    assert whole([failed, request(100, 1, tokens=1)], windows(1)) == [[]]


def test_a_difference_is_found_under_much_larger_drift() -> None:
    made = closed_loop(200, 1.01, noise=0.02, drift=0.004, seed=1)
    found = compare(made, windows(200))
    assert found.tpot.low < 1.01 < found.tpot.high
    assert found.tpot.low > 1.0
    assert found.tpot.high - found.tpot.low < 0.01
    assert 1.0 < found.e2e.low < found.e2e.high < 1.02
    assert found.requests + found.straddled == len(made)


def test_a_steady_drift_cancels() -> None:
    values = [1.05**index for index in range(40)]
    assert ratio(values, [bool(i % 2) for i in range(40)]).ratio == pytest.approx(1.0)


def test_intervals_have_about_the_stated_coverage() -> None:
    """Intervals contain the true ratio in at least 50 of 60 runs, also for a ratio of 1."""
    for slower in (1.0, 1.02):
        hits = 0
        for seed in range(60):
            source = random.Random(seed)
            level, values = 0.0, []
            for index in range(80):
                level += 0.01 * source.gauss(0, 1)
                step = level + 0.01 * source.gauss(0, 1) + (math.log(slower) if index % 2 else 0)
                values.append(math.exp(step))
            found = ratio(values, [bool(i % 2) for i in range(80)], seed=seed)
            hits += found.low <= slower <= found.high
        assert 50 <= hits <= 60


def test_windows_disturbed_by_another_program_do_not_change_the_ratio() -> None:
    values: list[float | None] = [1.0] * 100
    for held_up in (7, 33, 71):
        values[held_up] = 5.0
    found = ratio(values, [bool(i % 2) for i in range(100)])
    assert found.ratio == 1.0


def test_windows_without_requests_are_left_out_and_too_few_are_refused() -> None:
    values: list[float | None] = [1.0, 2.0] * 10
    values[6] = None
    found = ratio(values, [bool(i % 2) for i in range(20)])
    assert found.compared == 15
    assert found.ratio == pytest.approx(2.0)
    with pytest.raises(AlternationError, match=r"7 windows .* at least 8"):
        ratio([1.0] * 9, [bool(i % 2) for i in range(9)])
