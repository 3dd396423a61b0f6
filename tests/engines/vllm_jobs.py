"""Runs jobs whose ranks are processes with vLLM's groups; see vllm_ranks.py."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from forked import Forks
from timely import patience

SCRIPT = Path(__file__).with_name("vllm_ranks.py")


def run_ranks(
    case: str, *nodes: str, forks: Forks | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a case to its end. forks: the script is a fork; None = an interpreter of its own.

    Raises:
        subprocess.TimeoutExpired: the ranks have not ended within 1200 s, times `patience`.
    """
    variables = {
        **os.environ,
        "R2SERVE_DISTRIBUTED_BACKEND": "r2ccl",
        "R2CCL_RAILS": "127.0.0.1,127.0.0.2",
        "VLLM_HOST_IP": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    command = [sys.executable, str(SCRIPT), case, ",".join(nodes)]
    start = forks.popen if forks else subprocess.Popen
    with tempfile.TemporaryFile() as output:
        ran = start(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            status = ran.wait(1200 * patience())
        finally:
            ran.kill()
        output.seek(0)
        text = output.read().decode(errors="replace")
    return subprocess.CompletedProcess(command, status, text)
