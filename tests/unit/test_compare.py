"""The decision of `make compare`: a slower build, an equal build, and too much noise."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "compare"))

from compare import Estimate, Round, judge, status_of

SIZES = (1024, 16384)


def rounds(count: int, slower: float, noise: float, seed: int = 1) -> list[Round]:
    """Returns rounds of a drifting machine; `slower` is this tree's true ratio."""
    source = random.Random(seed)

    def medians(factor: float, drift: float) -> dict[int, float]:
        return {size: 50 * factor * drift * source.gauss(1, noise) for size in SIZES}

    made = []
    for number in range(count):
        drift = 1 + 0.05 * number
        made.append(Round(medians(1, drift), medians(slower, drift), medians(1, drift)))
    return made


@pytest.mark.parametrize(("slower", "status"), [(1.0, 0), (0.9, 0), (1.02, 0), (1.06, 1)])
def test_a_slower_build_is_found_despite_drift(slower: float, status: int) -> None:
    decided, estimates = judge(rounds(20, slower, 0.01))
    assert decided == status
    for ratio, noise in estimates.values():
        assert ratio.median == pytest.approx(slower, abs=0.015)
        assert noise.median == pytest.approx(1, abs=0.015)


def test_few_rounds_and_wide_intervals_decide_nothing() -> None:
    assert judge(rounds(4, 1.0, 0.0))[0] == 2
    assert judge(rounds(6, 1.0, 0.2))[0] == 2


def test_one_slow_size_is_enough() -> None:
    fast, slow = Estimate(1.0, 0.99, 1.01), Estimate(1.05, 1.04, 1.06)
    assert status_of([fast, fast]) == 0
    assert status_of([fast, slow]) == 1
    assert status_of([fast, slow, Estimate(1.0, 0.9, 1.1)]) == 2
