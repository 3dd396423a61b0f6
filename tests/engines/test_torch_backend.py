"""The torch.distributed backend r2ccl: operations, shutdown, and PyTorch's own tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent


def run(
    script: str, *arguments: str, timeout_s: int = 120, driver: str = ""
) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "R2CCL_CUDA_LIBRARY": driver or "libcuda.so.1",
        "R2CCL_RAILS": "127.0.0.1,127.0.0.2",
        "R2CCL_NODE": "per-rank",
        "R2CCL_LINK_TIMEOUT_S": "2",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(FOLDER / script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        ("reductions", 3),
        ("movements", 3),
        ("asynchronous", 3),
        ("point_to_point", 3),
        ("groups", 3),
        ("layouts", 3),
        ("hooks", 2),
        ("death_in_training", 3),
        ("aborted", 3),
        ("again", 2),
        ("mistakes", 2),
        ("late", 3),
        ("overdue", 2),
        ("overdue_later", 2),
        ("death", 3),
        ("unmatched", 2),
        ("forgotten", 2),
    ],
)
def test_ranks(case: str, ranks: int) -> None:
    ran = run("torch_ranks.py", case, str(ranks))
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-6000:]


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        ("reductions", 3),
        ("movements", 3),
        ("asynchronous", 3),
        ("point_to_point", 3),
        ("groups", 3),
        ("layouts", 3),
        ("hooks", 2),
        ("aborted", 3),
        ("again", 2),
        ("mistakes", 2),
        ("overdue", 2),
        ("overdue_later", 2),
        ("death", 3),
        ("forgotten", 2),
        ("nothing_void_is_sent", 3),
    ],
)
def test_ranks_with_tensors_of_a_gpu(case: str, ranks: int, cuda_driver: str) -> None:
    ran = run("torch_ranks.py", case, str(ranks), "gpu", driver=cuda_driver)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-6000:]


def suite(name: str, only: Sequence[str] = ()) -> dict[str, Any]:
    ran = run("torch_suite.py", name, json.dumps(list(only)), timeout_s=550)
    assert ran.stdout.strip(), ran.stderr[-6000:]
    report: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    assert not report["failed"], f"as {name}: " + "\n".join(report["failed"].values())[-8000:]
    return report


@pytest.mark.timeout(1200)
def test_pytorchs_own_tests(show: Any) -> None:
    """Runs PyTorch's tests for a CPU backend, except for features not supported by r2ccl."""
    passed: set[str] = set()
    left: dict[str, str] = {}
    for name in ("gloo", "r2ccl", "mpi"):
        report = suite(name, sorted(left))
        passed |= set(report["passed"])
        # The first reason for a skip is kept: PyTorch expects little from the backend mpi.
        left = {each: left.get(each, why) for each, why in report["skipped"].items()}
        show(f"PyTorch's tests as {name}: {len(report['passed'])} passed, {len(left)} skipped")
    for why, count in Counter(left.values()).most_common():
        show(f"skipped {count}: {why}")
    assert len(passed) > 100
