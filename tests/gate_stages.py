"""The stages of `make test`, `make quick` and `make test-long`."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
CORES = os.cpu_count() or 1
HANG_S = 600.0
LONG_HANG_S = 1800.0
"""Limits of a native program in s; CTest's own limits (CMakeLists.txt) are longer."""
# Many tests wait for faults to end and for processes to start, without using a CPU. A worker with
# two engines of two ranks each takes 4 GiB.
WORKERS = max(2, min(CORES + 1, psutil.virtual_memory().total >> 32, 8))


@dataclass(frozen=True)
class Stage:
    """A stage: a make target, or tests chosen by pytest's arguments.

    folders: of the tests; none = all of pyproject.toml. budget_s: wall-clock limit in s, about
    twice the usual time; multiplied by the factor for waits. beside: a second choice of tests, run
    at low priority meanwhile. ahead: native tests of later stages are compiled meanwhile. hang_s:
    limit of a native program in s, multiplied by the factor, too.
    """

    name: str
    budget_s: float
    target: str = ""
    variant: str = ""
    pytest: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    beside: Stage | None = None
    ahead: bool = False
    hang_s: float = HANG_S


def _workers(count: int) -> tuple[str, ...]:
    return ("-n", str(count), "--dist", "worksteal")


def _marked(marker: str) -> tuple[str, ...]:
    """Returns the files with tests of a marker: collecting only these saves half a minute."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    found = [path for path in files if f"mark.{marker}" in path.read_text(encoding="utf-8")]
    return tuple(str(path.relative_to(ROOT)) for path in found)


ONE_WORKER = ("-n", "1")
"""A separate process for the tests: after its death the next process runs the other tests."""
IN_PARALLEL = "not long and not alone and not guest and not computes"
UNIT = ("tests/unit", "tests/kernels")
COMPUTING = Stage(
    "computing",
    1500,
    pytest=(*_workers(CORES), "-m", "computes and not long"),
    folders=_marked("computes"),
)
STAGES = (
    Stage("lint", 900, target="lint"),
    Stage("plain", 900, target="native-plain", variant="plain"),
    Stage("unit", 900, pytest=(*_workers(WORKERS), "-m", IN_PARALLEL), folders=UNIT, ahead=True),
    Stage(
        "engines",
        2400,
        pytest=(*_workers(WORKERS), "-m", IN_PARALLEL),
        folders=("tests/engines", "tests/e2e"),
        ahead=True,
    ),
    Stage(
        "guest",
        1200,
        pytest=(*ONE_WORKER, "-m", "guest and not long"),
        folders=_marked("guest"),
        beside=COMPUTING,
        ahead=True,
    ),
    Stage("asan", 1200, target="native-asan", variant="asan", ahead=True),
    Stage("tsan", 1200, target="native-tsan", variant="tsan"),
    Stage(
        "alone",
        1200,
        pytest=(*ONE_WORKER, "-m", "alone and not long"),
        folders=_marked("alone"),
    ),
)
QUICK_STAGES = (
    Stage("lint", 300, target="lint-quick"),
    Stage("plain", 600, target="native-quick", variant="plain"),
    # A worker imports for 20 s of CPU time, and these tests hardly wait.
    Stage(
        "unit", 300, pytest=(*_workers(CORES), "-m", f"{IN_PARALLEL} and not slow"), folders=UNIT
    ),
)
"""Stages of `make quick`: what an engineer runs between two edits."""


def _long(name: str, *files: str, without: Sequence[str] = (), budget_s: float = 3600) -> Stage:
    """Long tests run one at a time, since many of them measure."""
    left_out = tuple(f"--ignore={each}" for each in without)
    return Stage(name, budget_s, pytest=(*ONE_WORKER, "-m", "long", *left_out), folders=files)


SEARCHES = ("tests/unit/test_model.py", "tests/e2e/test_sim_campaign.py", "tests/e2e/test_fuzz.py")
SERVERS = tuple(f"tests/e2e/test_{each}.py" for each in ("bench_serve", "dashboard", "demo"))
HOUR = ("tests/e2e/test_hour.py",)
STALLS = tuple(f"tests/e2e/test_{each}.py" for each in ("baseline", "stall_distributions"))
LOADS = tuple(
    f"tests/e2e/test_{each}.py"
    for each in ("crowd", "fork", "growth", "huge", "random_collectives", "soak")
)
GUEST = ("tests/e2e/test_guest.py",)
SGLANG = ("tests/engines/sglang",)
LONG_STAGES = (
    Stage("lint", 3600, target="lint-all"),
    *(
        Stage(each, 3600, target=f"native-{each}-long", variant=each, hang_s=LONG_HANG_S)
        for each in ("plain", "asan", "tsan")
    ),
    _long("unit", *UNIT, without=SEARCHES),
    _long("searches", *SEARCHES),
    _long("engines", "tests/engines", without=SGLANG),
    _long("sglang", *SGLANG, budget_s=5400),
    _long("servers", *SERVERS),
    _long("hour", *HOUR),
    _long("stalls", *STALLS),
    _long("loads", *LOADS),
    _long("guest", *GUEST),
    _long(
        "faults",
        "tests/e2e",
        without=(*SEARCHES, *SERVERS, *HOUR, *STALLS, *LOADS, *GUEST),
    ),
)
"""Stages of `make test-long`, which run on their own, too: `make test-long PART=hour`."""

COMPILED_AHEAD = ("asan", "tsan")
MEMORY_AHEAD = 20 << 30
"""Bytes of memory of a machine for two engines a worker, and a compiler for each CPU."""


def compiled_beside(stage: Stage, later: Sequence[Stage]) -> list[str]:
    """Returns the variants of later stages that are compiled beside a stage."""
    if not stage.ahead or psutil.virtual_memory().total < MEMORY_AHEAD:
        return []
    return [each.variant for each in later if each.variant in COMPILED_AHEAD]


GUEST_FILES = (
    *("csrc/connect", "csrc/device", "csrc/drivers", "csrc/link", "csrc/rails"),
    "tests/guest",
)
GUEST_PASSED = ROOT / "tests" / "guest" / "passed.txt"


def git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def guest_digest() -> str:
    """Returns a digest of the files that the tests in the guest judge."""
    digest = hashlib.sha256()
    names = git("ls-files", "--", *GUEST_FILES).splitlines()
    for name in sorted(names):
        if ROOT / name != GUEST_PASSED and (ROOT / name).exists():
            digest.update(name.encode() + b"\0" + (ROOT / name).read_bytes() + b"\0")
    return digest.hexdigest()


def without_passed_guest(stages: Sequence[Stage], say: Callable[[str], None]) -> list[Stage]:
    """Leaves out the guest, but no test that computes, if the guest passed with these files."""
    if not any(each.name == "guest" for each in stages):
        return list(stages)
    passed = GUEST_PASSED.read_text().split() if GUEST_PASSED.exists() else []
    digest = guest_digest()
    if digest not in passed:
        say(f"guest: files {digest[:12]} are new to {GUEST_PASSED.name}")
        return list(stages)
    say(f"guest: passed with files {digest[:12]}, so it does not run")
    return [COMPUTING if each.name == "guest" else each for each in stages]
