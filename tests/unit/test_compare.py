"""The decision of `make compare`: a slower build, an equal build, and too much noise."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "compare"))

from compare import WORKER, Cycle, Estimate, Start, judge, status_of

SIZES = (1024, 16384)


def starts(count: int, slower: float, noise: float, seed: int = 1) -> list[Start]:
    """Returns starts on a drifting machine; `slower` is this tree's true ratio."""
    source = random.Random(seed)

    def cycle(number: int) -> Cycle:
        drift = 50 * (1 + 0.05 * number)
        times = (drift * factor * source.gauss(1, noise) for factor in (1, slower, 1))
        return Cycle(*times)

    return [{size: [cycle(number) for number in range(10)] for size in SIZES} for _ in range(count)]


@pytest.mark.parametrize(("slower", "status"), [(1.0, 0), (0.9, 0), (1.02, 0), (1.06, 1)])
def test_a_slower_build_is_found_despite_drift(slower: float, status: int) -> None:
    decided, estimates = judge(starts(20, slower, 0.02))
    assert decided == status
    for ratio, noise in estimates.values():
        assert ratio.median == pytest.approx(slower, abs=0.015)
        assert noise.median == pytest.approx(1, abs=0.015)


def test_few_starts_and_wide_intervals_decide_nothing() -> None:
    assert judge(starts(4, 1.0, 0.0))[0] == 2
    assert judge(starts(6, 1.0, 0.4))[0] == 2


def test_one_slow_size_is_enough() -> None:
    fast, slow = Estimate(1.0, 0.99, 1.01), Estimate(1.05, 1.04, 1.06)
    assert status_of([fast, fast]) == 0
    assert status_of([fast, slow]) == 1
    assert status_of([fast, slow, Estimate(1.0, 0.9, 1.1)]) == 2


def test_a_worker_refuses_another_build_than_the_one_to_measure(tmp_path: Path) -> None:
    """The editable install comes before PYTHONPATH, so both builds were the same one."""
    done = subprocess.run(
        [sys.executable, str(WORKER), str(tmp_path), "0", "1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"must be below {tmp_path}" in done.stderr
