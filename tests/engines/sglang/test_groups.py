"""Groups of the installed SGLang, without a server: three ranks on two nodes of this machine."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from ports import free_port
from sglang_environment import python
from sglang_ranks import RANKS

RANK = Path(__file__).parents[1] / "sglang_ranks.py"
WITHIN_S = 600

pytestmark = pytest.mark.long


def test_groups_that_span_nodes_are_carried_and_others_are_sglangs() -> None:
    environment = {
        **os.environ,
        "SGLANG_USE_CPU_ENGINE": "1",
        "R2SERVE_DISTRIBUTED_BACKEND": "r2ccl",
        "R2SERVE_SPANS_NODES": "1",
        "R2CCL_RAILS": "127.0.0.2,127.0.0.3",
        "SGLANG_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    port = free_port()
    ranks = [
        subprocess.Popen(
            [str(python()), str(RANK), str(rank), str(port)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        told = [rank.communicate(timeout=WITHIN_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (out, errors) in zip(ranks, told, strict=True):
        assert rank.returncode == 0, errors[-4000:]
        assert json.loads(out.splitlines()[-1]) == {
            "world": "r2ccl",
            "spanning": ["r2ccl", "r2ccl"],
            "inside": ["gloo", "gloo"],
            "nodes": [0, 0, 1],
            "inside communicator": False,
        }
