"""The torch.distributed backend r2ccl: operations, shutdown, and PyTorch's own tests."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from forked import Forks
from timely import patience

FOLDER = Path(__file__).parent


def environment(driver: str = "") -> dict[str, str]:
    return {
        **os.environ,
        "R2CCL_CUDA_LIBRARY": driver or "libcuda.so.1",
        "R2CCL_RAILS": "127.0.0.1,127.0.0.2",
        "R2CCL_NODE": "per-rank",
        "R2CCL_LINK_TIMEOUT_S": "2",
        "OMP_NUM_THREADS": "1",
    }


def run_ranks(forks: Forks, folder: Path, *arguments: str, driver: str = "") -> None:
    """Runs torch_ranks.py as a fork of a process with torch imported; fails with its output."""
    output = folder / "output"
    with output.open("wb") as written:
        ran = forks.popen(
            [sys.executable, str(FOLDER / "torch_ranks.py"), *arguments],
            env=environment(driver),
            stdout=written,
            stderr=subprocess.STDOUT,
        )
        limit_s = 300 * patience()
        status: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = ran.wait(limit_s)
        finally:
            ran.kill()
    told = output.read_text(errors="replace")[-8000:]
    if status is None:
        pytest.fail(f"ranks of {arguments[0]} have not ended within {limit_s:g} s:\n{told}")
    assert status == 0, told


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        ("reductions", 3),
        ("movements", 3),
        ("asynchronous", 3),
        ("point_to_point", 3),
        ("tags", 2),
        ("wrong_sizes", 2),
        ("many_tags", 2),
        ("overdue_tag", 2),
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
        ("forked", 2),
    ],
)
def test_ranks(case: str, ranks: int, forks: Forks, tmp_path: Path) -> None:
    run_ranks(forks, tmp_path, case, str(ranks))


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        ("reductions", 3),
        ("movements", 3),
        ("asynchronous", 3),
        ("point_to_point", 3),
        ("tags", 2),
        ("wrong_sizes", 2),
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
        ("forked", 2),
        ("nothing_void_is_sent", 3),
    ],
)
def test_ranks_with_tensors_of_a_gpu(
    case: str, ranks: int, cuda_driver: str, forks: Forks, tmp_path: Path
) -> None:
    run_ranks(forks, tmp_path, case, str(ranks), "gpu", driver=cuda_driver)


def test_objects_within_compared_steps(
    forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("R2CCL_CONSENSUS", "step")
    run_ranks(forks, tmp_path, "objects_in_steps", "3")


def suite(name: str, only: Sequence[str] = ()) -> dict[str, Any]:
    script = str(FOLDER / "torch_suite.py")
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", script, name, json.dumps(list(only))],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert ran.stdout.strip(), ran.stderr[-6000:]
    report: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    assert not report["failed"], f"as {name}: " + "\n".join(report["failed"].values())[-8000:]
    return report


# Reasons for a skip under any backend's name: too few GPUs, NCCL only, switched off by PyTorch
# itself. A test starts four processes, even a skipped test.
SKIPPED_ANYWAY = re.compile(r"at least \d CUDA|NCCL|github\.com/pytorch|torchvision", re.IGNORECASE)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_pytorchs_own_tests(show: Any) -> None:
    """Runs PyTorch's tests for a CPU backend, except for features not supported by r2ccl."""
    passed: set[str] = set()
    left: dict[str, str] = {}
    for name in ("gloo", "r2ccl", "mpi"):
        open_to_others = [each for each, why in left.items() if not SKIPPED_ANYWAY.search(why)]
        report = suite(name, sorted(open_to_others))
        passed |= set(report["passed"])
        # The first reason for a skip is kept: PyTorch expects little from the backend mpi.
        anyway = {each: why for each, why in left.items() if each not in open_to_others}
        left = anyway | {each: left.get(each, why) for each, why in report["skipped"].items()}
        show(f"PyTorch's tests as {name}: {len(report['passed'])} passed, {len(left)} skipped")
    for why, count in Counter(left.values()).most_common():
        show(f"skipped {count}: {why}")
    assert len(passed) > 100
