"""Prints facts of this machine: a line of JSON for each, `null` for an unknown fact.

    python3 tests/gpu/facts.py LIBRARY

LIBRARY is the CUDA driver. The script uses only the standard library. A separate process asks torch
and Triton, so a crash or a hang there loses a single line.

Exit status: 1 without torch. On a machine with a GPU (R2SERVE_TEST_ON_GPU=1), also 1 if torch does
not see the GPU.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # needed if PYTHONSAFEPATH is set

from driver import first_gpu

QUERIES = {
    "nvidia-smi": "nvidia-smi -L",
    "pcie": "nvidia-smi --query-gpu=driver_version,pcie.link.gen.current,pcie.link.width.current,"
    "memory.free --format=csv,noheader",
    "g++": "g++ --version",
    "nvcc": "nvcc --version",
    "libc": "ldd --version",
}
TORCH = (
    "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available());"
    "torch.cuda.is_available() and torch.zeros(1).cuda()"
)


def say(name: str, value: object) -> None:
    sys.stdout.write(json.dumps({name: value}) + "\n")
    sys.stdout.flush()


def answer(command: list[str], timeout_s: float = 10.0) -> str | None:
    """Returns the output of the command; None = the command is missing or failed."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def main(library: str) -> int:
    say("kernel", platform.release())
    say("cores", os.cpu_count())
    say("memlock_bytes", resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    say("python", [sys.executable, platform.python_version()])
    for name, command in QUERIES.items():
        said = answer(command.split())
        say(name, None if said is None else said.splitlines())
    say(
        "tools",
        {name: shutil.which(name) for name in ("git", "cmake", "ninja", "compute-sanitizer")},
    )
    infiniband = Path("/dev/infiniband")
    say(
        "infiniband",
        sorted(each.name for each in infiniband.iterdir()) if infiniband.is_dir() else None,
    )
    gpu = first_gpu(library)
    say("driver", gpu if isinstance(gpu, str) else asdict(gpu))
    say("triton", answer([sys.executable, "-c", "import triton; print(triton.__version__)"]))
    torch = answer([sys.executable, "-c", TORCH], 30.0)
    say("torch", torch)
    if torch is None:
        return 1
    if os.environ.get("R2SERVE_TEST_ON_GPU") == "1" and torch.endswith("False"):
        say("wrong", "torch.cuda.is_available() is False on a machine with a GPU")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
