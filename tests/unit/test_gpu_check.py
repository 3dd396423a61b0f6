"""``make gpu-check`` where there is no GPU, and where a driver shows one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHECK = Path(__file__).resolve().parents[1] / "gpu/check.py"


def check(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(CHECK), *arguments],
        env=None if path is None else {"PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_without_a_gpu_it_says_so_and_is_skipped() -> None:
    done = check("--library", "libcuda_of_nobody.so.1")
    assert (done.returncode, done.stdout) == (77, "no GPU here: nothing was checked\n")


def test_without_a_compiler_it_fails(fake_cuda: Path) -> None:
    done = check("--library", str(fake_cuda), path="/nonexistent")
    assert (done.returncode, done.stdout) == (1, "no nvcc in PATH: the kernels cannot be built\n")
