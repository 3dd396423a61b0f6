"""Runs the checks for a machine with a GPU: `make gpu-check` and `tests/gpu/first.sh`.

Stages run in order, smallest first. A failed stage does not stop the other stages. The folder $OUT
(default: `build/gpu-check`) gets `gpu.log`, written line by line, and `steps.jsonl`, with a record
after each step. The script uses only the standard library; git and a network are not needed.

Exit status: 0 every step passed; 1 a step failed; 77 no GPU, and nothing was checked.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # needed if PYTHONSAFEPATH is set

from driver import Gpu, first_gpu
from install import install
from stages import ROOT, SITE, STAGES, Here, needs_of_vllm
from stepper import Stepper

NO_GPU = 77  # the exit status with which automake marks a skipped test
DRIVER = "libcuda.so.1"


def commit() -> str:
    """Returns $R2SERVE_COMMIT, because a copied tree has no history; else the name from git."""
    stated = os.environ.get("R2SERVE_COMMIT")
    if stated:
        return stated
    if shutil.which("git") is None:
        return "unknown"
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def environment(here: Here) -> dict[str, str]:
    """Returns the variables for all steps.

    With R2SERVE_TEST_ON_GPU=1 a step fails instead of using the fake driver or an interpreter.
    PYTHONSAFEPATH makes Python import the installed package. Without this variable Python imports
    the tree's `r2serve`, which has no core.
    """
    python_path = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "R2SERVE_TEST_ON_GPU": str(int(here.on_gpu)),
        "PYTHONPATH": os.pathsep.join(python_path),
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "R2CCL_CUDA_LIBRARY": here.library,
        "R2SERVE_COMMIT": commit(),
    }


def run(stepper: Stepper, name: str, here: Here) -> None:
    stage = STAGES[name]
    if stage.needs_gpu and not here.on_gpu:
        stepper.skip(name, "no GPU")
        return
    if stage.program and shutil.which(stage.program) is None:
        stepper.skip(name, f"no {stage.program} in PATH")
        return
    if name == "install":
        install(stepper, here)
        return
    failed = ""
    for step in stage.steps(here):
        if failed:
            stepper.skip(step.name, f"{failed} failed")
        elif stepper.run(step).failed:
            failed = step.name


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="first.sh",
        description=(__doc__ or "").splitlines()[0],
        epilog="\n".join(f"  {name:<9} {stage.meaning}" for name, stage in STAGES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    by_default = [name for name, stage in STAGES.items() if stage.by_default]
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="default: all but vllm")
    parser.add_argument("--library", default=DRIVER, help=f"the CUDA driver (default: {DRIVER})")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(os.environ.get("OUT") or ROOT / "build/gpu-check"),
        help="folder for results (default: $OUT, else build/gpu-check)",
    )
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.stages) - set(STAGES))
    if unknown:
        parser.error(f"stages: {', '.join(unknown)}; right: {', '.join(STAGES)}")
    gpu = first_gpu(options.library)
    if isinstance(gpu, str):
        sys.stdout.write("no GPU here: nothing was checked\n")
        if "vllm" in options.stages:  # printing the list needs no GPU
            needs = str(ROOT / "tests/gpu/vllm_needs.py")
            subprocess.run([sys.executable, needs, f"--library={options.library}"], check=False)
        return NO_GPU
    out = options.out.resolve()
    on_gpu = options.library == DRIVER or isinstance(first_gpu(DRIVER), Gpu)
    here = Here(sys.executable, options.library, out, on_gpu)
    stepper = Stepper(out, ROOT, environment(here))
    date = datetime.now(UTC).isoformat(timespec="seconds")
    stepper.record(gpu=gpu.name, commit=commit(), date=date, began_unix_s=round(time.time(), 3))
    # The list is quick, so a machine without vLLM spends no time on a build.
    first = "vllm" in options.stages and stepper.run(needs_of_vllm(here, "--without-r2serve"))
    for name in options.stages or by_default:
        if first and first.failed:
            stepper.skip(name, "vLLM cannot run here")
        else:
            run(stepper, name, here)
    failed = [outcome.step for outcome in stepper.outcomes if outcome.failed]
    stepper.say(f"{gpu.name}: {len(stepper.outcomes)} steps, failed: {', '.join(failed) or 'none'}")
    stepper.say(f"results: {out}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
