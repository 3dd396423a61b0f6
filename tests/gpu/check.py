"""Checks on a GPU what no other machine can: ``make gpu-check``; with ``--vllm``, which
``make gpu-check-vllm`` passes, how real vLLM fares there.

Needs nvcc, and a Python with torch for CUDA and Triton.  What else is missing is installed from
wheels in ``wheels/``, which git ignores: nothing is fetched.  Writes what it found to
``bench/results/<gpu>-<date>-<commit>.jsonl`` and prints a table last.

Exit status: 0 everything passed; 1 something did not; 77 there is no GPU, and nothing was checked.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / "build/gpu"
WHEELS = ROOT / "wheels"
TORCH_BACKEND = "tests/engines/test_torch_backend.py"
NO_GPU = 77
BUDGET_S = 480.0
VLLM = "vllm>=0.20.1,<=0.25.1"
"""Releases for torch 2.11."""
VLLM_BUDGET_S = 1800.0
NEEDED = (
    *("click", "hypothesis", "nanobind", "numpy", "psutil", "pytest", "pytest-timeout", "rich"),
    *("cmake", "ninja", "scikit-build-core"),
)


@dataclass(frozen=True)
class Step:
    name: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    step: str
    status: int
    """Of the command; 124: out of time."""
    seconds: float
    last_line: str


def gpu_name(library: str) -> str | None:
    """Of the first GPU; None: the driver shows none, or there is no driver."""
    try:
        cuda = ctypes.CDLL(library)
    except OSError:
        return None
    count, device, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or count.value == 0:
        return None
    if cuda.cuDeviceGet(ctypes.byref(device), 0) or cuda.cuDeviceGetName(name, 256, device):
        return None
    return name.value.decode()


def steps(python: str, rows: Path) -> list[Step]:
    pytest = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    bench = str(Path(python).with_name("r2serve"))
    return [
        Step("collectives of two ranks, graphs under cuts", (*pytest, "tests/unit/test_device.py")),
        Step("kernels against references", (*pytest, "tests/kernels")),
        Step("torch.distributed, ranks that share the GPU", (*pytest, TORCH_BACKEND, "-k", "gpu")),
        Step("kernels, timed", (bench, "bench", "kernels", "--jsonl", str(rows))),
    ]


def vllm_steps(python: str, report: Path) -> list[Step]:
    """Two nodes of one worker each on one GPU; rails over loopback are cut while they decode."""
    r2serve = str(Path(python).with_name("r2serve"))
    return [
        Step("graphs of two nodes under cuts", (r2serve, "demo", "--gpu", "--json", str(report))),
    ]


def run(step: Step, left_s: float) -> Outcome:
    """Shows what the command printed, and keeps its last line."""
    say(f"== {step.name}")
    began = time.monotonic()
    try:
        done = subprocess.run(
            step.command,
            cwd=ROOT,
            env=os.environ | {"CUDA_MODULE_LOADING": "EAGER"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=max(left_s, 0.001),
            check=False,
        )
        output, status = done.stdout, done.returncode
    except subprocess.TimeoutExpired as late:
        output, status = (late.output or b"").decode(errors="replace"), 124
    say(output)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return Outcome(step.name, status, time.monotonic() - began, lines[-1] if lines else "")


def installation(python: str, further: Sequence[str]) -> list[Step]:
    """r2serve itself, into an environment that sees the torch and Triton that are here."""
    where = str(ENVIRONMENT)
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index")
    return [
        Step("environment", (sys.executable, "-m", "venv", "--system-site-packages", where)),
        Step("what is missing", (*pip, "--find-links", str(WHEELS), *NEEDED, *further)),
        Step("r2serve", (*pip, "--no-deps", "--no-build-isolation", "-e", str(ROOT))),
    ]


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def table(outcomes: list[Outcome]) -> str:
    rows = [("step", "status", "seconds", "last line")]
    for each in outcomes:
        word = {0: "passed", 124: "out of time"}.get(each.status, f"failed ({each.status})")
        rows.append((each.step, word, f"{each.seconds:.1f}", each.last_line[:100]))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
        for row in rows
    )


def say(text: str) -> None:
    sys.stdout.write(text.rstrip() + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--library", default="libcuda.so.1", help="the CUDA driver")
    parser.add_argument("--results", type=Path, default=ROOT / "bench/results", metavar="FOLDER")
    parser.add_argument("--vllm", action="store_true", help="vLLM, and nothing else")
    options = parser.parse_args()
    gpu = gpu_name(options.library)
    if gpu is None:
        say("no GPU here: nothing was checked")
        return NO_GPU
    if shutil.which("nvcc") is None:
        say("no nvcc in PATH: the kernels cannot be built")
        return 1
    python = str(ENVIRONMENT / "bin/python")
    began, at = time.monotonic(), datetime.now(UTC)
    rows = ROOT / "build/gpu-rows.jsonl"
    rows.unlink(missing_ok=True)
    budget_s = VLLM_BUDGET_S if options.vllm else BUDGET_S
    outcomes: list[Outcome] = []
    for step in installation(python, [VLLM] if options.vllm else []):
        outcomes.append(run(step, budget_s))
        if outcomes[-1].status != 0:
            break
    else:
        checks = vllm_steps(python, rows) if options.vllm else steps(python, rows)
        outcomes += [run(step, began + budget_s - time.monotonic()) for step in checks]
    kind = "vllm-" if options.vllm else ""
    name = f"{gpu.split()[-1].lower()}-{kind}{at:%Y-%m-%d}-{commit()}.jsonl"
    about = {"gpu": gpu, "commit": commit(), "date": at.isoformat(timespec="seconds")}
    lines = [json.dumps(about | asdict(outcome)) for outcome in outcomes]
    if rows.exists():
        # A report of the demo is one object over many lines, the benchmark's rows are one each.
        written = rows.read_text()
        lines += [json.dumps(json.loads(written))] if options.vllm else written.splitlines()
    (options.results / name).write_text("\n".join(lines) + "\n")
    say(table(outcomes))
    return int(any(outcome.status != 0 for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
