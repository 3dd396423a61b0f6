"""Facts of this machine: a line of JSON for each, ``null`` for an unknown.

    python3 tests/gpu/facts.py LIBRARY

LIBRARY is the CUDA driver.  Standard library only; torch and Triton are asked by a process of their
own, so a crash or a hang costs a line.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from pathlib import Path

# Numbers of CUdevice_attribute (cuda.h).
ATTRIBUTES = {
    "compute_capability_major": 75,
    "compute_capability_minor": 76,
    "compute_preemption": 90,
    "gpu_direct_rdma": 116,
    "flush_writes_options": 117,
    "gpu_direct_rdma_ordering": 118,
    "dma_buf": 124,
}
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
    """Output of the command; None: no such program, or a failure."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def driver(library: str) -> dict[str, int] | str:
    try:
        cuda = ctypes.CDLL(library)
    except OSError as error:
        return str(error)
    code = cuda.cuInit(0)
    if code != 0:
        return f"cuInit: {code}"
    number, found = ctypes.c_int(), {}
    if hasattr(cuda, "cuDriverGetVersion") and cuda.cuDriverGetVersion(ctypes.byref(number)) == 0:
        found["version"] = number.value
    for name, attribute in ATTRIBUTES.items():
        if cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, 0) == 0:
            found[name] = number.value
    return found


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
    say("driver", driver(library))
    say("triton", answer([sys.executable, "-c", "import triton; print(triton.__version__)"]))
    torch = answer([sys.executable, "-c", TORCH], 30.0)
    say("torch", torch)
    return int(torch is None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
