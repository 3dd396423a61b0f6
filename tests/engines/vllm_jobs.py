"""Runs jobs whose ranks are processes with vLLM's groups; see vllm_ranks.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from timely import patience

SCRIPT = Path(__file__).with_name("vllm_ranks.py")


def run_ranks(case: str, *nodes: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {
        **os.environ,
        "R2SERVE_DISTRIBUTED_BACKEND": "r2ccl",
        "R2CCL_RAILS": "127.0.0.1,127.0.0.2",
        "VLLM_HOST_IP": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    return subprocess.run(
        [sys.executable, str(SCRIPT), case, ",".join(nodes)],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200 * patience(),
        check=False,
    )
