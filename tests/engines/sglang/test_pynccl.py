"""The class in the place of ``PyNcclCommunicator``, on the fake CUDA driver: no GPU is needed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from ports import free_port
from sglang_environment import python

RANKS = Path(__file__).parents[1] / "sglang_cuda_ranks.py"
WITHIN_S = 900

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


def test_device_collectives_and_a_graph_survive_rail_cuts(fake_cuda: Path) -> None:
    told = subprocess.run(
        [str(python()), str(RANKS), str(free_port())],
        env={
            **os.environ,
            "SGLANG_USE_CPU_ENGINE": "1",
            "R2SERVE_DISTRIBUTED_BACKEND": "r2ccl",
            "R2SERVE_SPANS_NODES": "1",
            "R2CCL_RAILS": "127.0.0.2,127.0.0.3",
            "R2CCL_CUDA_LIBRARY": str(fake_cuda),
            "SGLANG_HOST_IP": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert told.returncode == 0, told.stdout + told.stderr[-4000:]
    for check in ("collectives", "outside", "graph"):
        assert told.stdout.count(f"passed {check}") == 2, told.stdout
