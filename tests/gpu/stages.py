"""The stages of the first minutes on a GPU, and their steps.

Stages with `needs_gpu` are skipped on a driver without a GPU. Limits in seconds are for an H100
with 16 cores. Without vllm and a build the limits add up to less than 30 minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from stepper import Step

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build/gpu-site"
# Two ranks of a process share a CUDA context and need eager loading. A late load of a kernel would
# wait for the other rank's kernel, and the other rank's kernel would wait for this rank. A rank in
# a separate process needs no eager loading, and starts 3 to 8 s sooner.
TOGETHER = {"CUDA_MODULE_LOADING": "EAGER"}
REPLAY = (
    "import json, sys, torch; from r2serve.bench.kernels import replay as r;"
    "row = r.measure(sys.argv[1], torch.device('cuda', 0), r.capture_on_gpu);"
    "print(json.dumps(row.as_json()))"
)


@dataclass(frozen=True)
class Here:
    """This machine: Python, driver, and the folder for results."""

    python: str
    library: str
    out: Path
    on_gpu: bool
    """True = a real GPU is here; False = `library` is the fake driver."""

    def pytest(self, limit_s: int, *arguments: str, processes: int = 1) -> tuple[str, ...]:
        command = [self.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--maxfail=5"]
        if _has("pytest_timeout"):
            command.append(f"--timeout={limit_s}")
        else:  # strict pytest rejects the missing plugin's options in pyproject.toml
            command += ["-o", "addopts=--import-mode=importlib"]
        if processes > 1 and _has("xdist"):
            command += ["-n", str(processes)]
        return (*command, *arguments)

    def smoke(self, what: str, limit_s: float) -> tuple[str, ...]:
        """Returns the command; tracebacks are written 5 s before the step's limit."""
        program = str(ROOT / "tests/gpu/smoke.py")
        return (
            self.python,
            program,
            what,
            f"--library={self.library}",
            f"--limit-s={limit_s - 5:g}",
        )

    def r2serve(self, *arguments: str) -> tuple[str, ...]:
        return (self.python, "-c", "from r2serve.cli import main; main()", *arguments)


def _has(module: str) -> bool:
    """Returns whether steps find the module, in this Python or in SITE."""
    return PathFinder.find_spec(module, [*sys.path, str(SITE)]) is not None


def facts(here: Here) -> list[Step]:
    return [
        Step("facts", (here.python, str(ROOT / "tests/gpu/facts.py"), here.library), 60, show=True)
    ]


def pair(here: Here) -> list[Step]:
    return [Step("pair", here.smoke("pair", 95), 95, TOGETHER, show=True)]


def node(here: Here) -> list[Step]:
    return [Step("node", here.smoke("node", 105), 105, show=True)]


def triton(here: Here) -> list[Step]:
    names = sorted(path.name for path in (ROOT / "tests/kernels").glob("test_*.py"))
    apart = {"test_arrival.py", "test_fused.py", "test_compiles.py"}
    files = [f"tests/kernels/{name}" for name in names if name not in apart]
    return [Step("triton", here.pytest(60, *files, processes=12), 150)]


def arrival(here: Here) -> list[Step]:
    files = ("tests/kernels/test_arrival.py", "tests/kernels/test_fused.py")
    return [Step("arrival", here.pytest(60, *files), 90, TOGETHER)]


def device(here: Here) -> list[Step]:
    command = here.pytest(300, "tests/unit/test_device.py")
    return [Step("device", command, 320, TOGETHER)]


def torch(here: Here) -> list[Step]:
    command = here.pytest(120, "tests/engines/test_torch_backend.py", "-k", "gpu", processes=3)
    return [Step("torch", command, 240)]


def replay(here: Here) -> list[Step]:
    return [Step("replay", (here.python, "-c", REPLAY, here.library), 120, TOGETHER, show=True)]


def bench(here: Here) -> list[Step]:
    rows = str(here.out / "kernels.jsonl")
    # The last row measures 2 ranks of this process: a replayed graph.
    return [Step("bench", here.r2serve("bench", "kernels", "--jsonl", rows), 280, TOGETHER)]


def memcheck(here: Here) -> list[Step]:
    """Leaves out kernels that wait: the sanitizer serialises launches, so these would hang."""
    tool = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9")
    tests = ("tests/kernels/test_reduce_chunks.py", "tests/kernels/test_quantize_chunks.py")
    return [Step("memcheck", (*tool, *here.pytest(120, "-x", "-k", "not arrival", *tests)), 120)]


def needs_of_vllm(here: Here, *options: str) -> Step:
    program = str(ROOT / "tests/gpu/vllm_needs.py")
    command = (here.python, program, f"--library={here.library}", *options)
    return Step("vllm-needs", command, 30, show=True)


def vllm(here: Here) -> list[Step]:
    report = str(here.out / "vllm.json")
    demo = here.r2serve("demo", "--gpu", "--json", report)
    return [needs_of_vllm(here), Step("vllm", demo, 1500)]


@dataclass(frozen=True)
class Stage:
    """Named steps; a failed step skips the remaining steps of the stage."""

    steps: Callable[[Here], list[Step]]
    meaning: str
    needs_gpu: bool = False
    program: str = ""
    """The stage is skipped if this program is not in PATH."""
    by_default: bool = True


STAGES = {
    "facts": Stage(facts, "GPU, driver, kernel, compilers, torch"),
    "install": Stage(lambda here: [], "r2serve: the wheel of build/gpu-kit, or built here"),
    "pair": Stage(pair, "2 ranks in one process: eager, graph, cut rail, Triton, latency"),
    "node": Stage(node, "2 nodes of 2 ranks, four processes: CUDA IPC, exchange"),
    "arrival": Stage(arrival, "Triton kernels that wait"),
    "triton": Stage(triton, "Triton kernels against their references"),
    "device": Stage(device, "collectives, graphs replayed under cuts"),
    "replay": Stage(replay, "replayed graphs, timed", needs_gpu=True),
    "torch": Stage(torch, "torch.distributed, ranks that share the GPU"),
    "bench": Stage(bench, "kernels, timed", needs_gpu=True),
    "memcheck": Stage(
        memcheck,
        "compute-sanitizer, kernels without arrival",
        needs_gpu=True,
        program="compute-sanitizer",
    ),
    "vllm": Stage(vllm, "vLLM on two nodes that share the GPU", needs_gpu=True, by_default=False),
}
