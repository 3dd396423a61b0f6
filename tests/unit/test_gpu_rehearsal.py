"""Rehearses the first minutes on a GPU from an empty folder, on the fake driver."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from gpu_tools import install, kit, runs, stages
from rehearsal import bare_python, copy_tree, pack_kit
from timely import ended, timely

GRACE_S = 20.0
STAGES = ("facts", "install", "pair", "node", "bench")
# Planted stages: a hang with a child, a failure, a last stage, and a stage for the kill.
PLANTED = """
import sys
sys.path.insert(0, "tests/gpu")
import check
from stages import STAGES, Stage
from stepper import Step

def plant(name, limit_s, *command):
    STAGES[name] = Stage(lambda here: [Step(name, command, limit_s)], "")

plant("hangs", 2, "sh", "-c", "sleep 61 & echo $!; sleep 61")
plant("fails", 10, "sh", "-c", "echo no luck; exit 5")
plant("after", 10, "echo", "it runs")
plant("long", 60, "sh", "-c", "echo begun; sleep 59")
sys.exit(check.main())
"""


class Machine:
    """A folder with a tree, a bare Python and a folder for results."""

    def __init__(self, folder: Path, driver: Path, python: Path) -> None:
        self.tree, self.out, self.driver = folder / "tree", folder / "out", driver
        self.python = python
        copy_tree(self.tree)
        # The environment of the tests is not in PATH; pip finds no index.
        self.environment = {
            "PATH": f"{python.parent}:/usr/bin:/bin",
            "HOME": str(folder),
            "TMPDIR": str(folder),
            "OUT": str(self.out),
            "PYTHON": str(self.python),
            "R2SERVE_COMMIT": "rehearsed",
            "PIP_INDEX_URL": "http://127.0.0.1:9/",
        }

    def start(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*command, f"--library={self.driver}"],
            cwd=self.tree,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def end(self, ran: subprocess.Popen[str], limit_s: float) -> str:
        """Returns the output of a run; a late run is ended with its steps, and the test fails."""
        try:
            return ran.communicate(timeout=limit_s)[0]
        except subprocess.TimeoutExpired:
            os.killpg(ran.pid, signal.SIGTERM)  # check.py ends the group of its step
            said, _ = ran.communicate(timeout=GRACE_S)
            pytest.fail(f"no end within {limit_s:g} s:\n{said}")

    def run(self, *names: str) -> tuple[int, str]:
        """Runs first.sh with these stages; returns exit status and output."""
        here = stages.Here(str(self.python), str(self.driver), self.out, on_gpu=False)
        limits = [each.limit_s for name in names for each in stages.STAGES[name].steps(here)]
        limit_s = sum(limits) + 3 * install.STEP_S + GRACE_S
        ran = self.start("bash", "tests/gpu/first.sh", *names)
        said = self.end(ran, limit_s)
        return ran.returncode, said

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / "steps.jsonl").read_text().splitlines()]

    def lines(self) -> list[dict[str, Any]]:
        """Returns the lines of JSON in the log."""
        log = (self.out / "gpu.log").read_text().splitlines()
        return [json.loads(line) for line in log if line.startswith("{")]


@pytest.fixture(scope="module")
def machine(fake_cuda: Path, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    folder = tmp_path_factory.mktemp("gpu")
    made = Machine(folder, fake_cuda, bare_python(folder / "python"))
    pack_kit(made.tree)
    return made


def first_stages(machine: Machine, show: Callable[[str], None]) -> list[dict[str, Any]]:
    """Runs the first stages and checks them; returns the records of their steps."""
    status, said = machine.run(*STAGES)
    (about, *steps) = machine.records()
    for each in steps:
        show(
            f"{each['step']:<8} rc={each['rc']} {each['seconds']:5.1f} s  {each['last_line'][:90]}"
        )
    assert status == 0, said
    assert (about["gpu"], about["commit"]) == ("Fake", "rehearsed")
    lines = machine.lines()
    eager = next(line for line in lines if line.get("step") == "eager")
    took_s = eager["unix_s"] - about["began_unix_s"]
    show(f"from nothing to the first collective: {took_s:.1f} s (target: 60 s)")
    assert all(line["right"] for line in lines if "right" in line)
    skipped = [line["step"] for line in lines if line.get("skipped") == "no GPU"]
    assert skipped == ["graph", "triton on slots"]
    exchanges = [line["why_not"] for line in lines if line.get("step") == "exchange"]
    assert exchanges == [None] * 4
    assert (machine.out / "gpu.log").read_text().startswith(f"{os.uname().release}\n")
    return steps


@pytest.mark.long
@pytest.mark.timeout(900)
def test_from_nothing_to_the_first_collective(
    machine: Machine, show: Callable[[str], None]
) -> None:
    steps = first_stages(machine, show)
    assert [(each["step"], each["rc"]) for each in steps] == [
        ("facts", 0),
        ("packages", 0),
        ("install", 0),
        ("import", 0),
        ("pair", 0),
        ("node", 0),
        ("bench", None),
    ]
    assert steps[-1]["last_line"] == "skipped: no GPU"
    assert str(machine.tree / "build/gpu-site") in steps[3]["last_line"]
    [python] = [line["python"] for line in machine.lines() if "python" in line]
    assert python[0] == str(machine.python)
    program = "import psutil"
    bare = subprocess.run([str(machine.python), "-c", program], capture_output=True, check=False)
    assert bare.returncode == 1  # the kit provides psutil


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_stages_of_pytest_find_their_tests(machine: Machine) -> None:
    """Uses the kit's packages and only collects the tests; another stage runs them."""
    names = ("arrival", "triton", "device", "torch")
    machine.environment["PYTEST_ADDOPTS"] = "--collect-only"
    status, said = machine.run("install", *names)
    del machine.environment["PYTEST_ADDOPTS"]
    assert status == 0, said
    steps = [each for each in machine.records() if each.get("step") in names]
    assert len(steps) == len(names)
    for each in steps:
        assert re.search(r"\b\d+(/\d+)? tests collected", each["last_line"]), each
    assert "--timeout=60" in (machine.out / "gpu.log").read_text()


@pytest.mark.slow
def test_hung_and_failed_stages_do_not_stop_other_stages(machine: Machine) -> None:
    ran = machine.start(str(machine.python), "-c", PLANTED, "hangs", "fails", "after")
    said = machine.end(ran, 300)
    assert ran.returncode == 1
    hung, failed, after = machine.records()[1:]
    assert (hung["rc"], failed["rc"], after["rc"]) == (124, 5, 0)
    assert 2 <= hung["seconds"] < 40  # the child sleeps for 61 s
    assert after["last_line"] == "it runs"
    log = (machine.out / "gpu.log").read_text().splitlines()
    begins = next(at for at, line in enumerate(log) if line.startswith("=== hangs"))
    assert not runs(int(log[begins + 1]))
    assert said.splitlines()[-2] == "Fake: 3 steps, failed: hangs, fails"


def test_a_killed_run_leaves_its_results(machine: Machine) -> None:
    ran = machine.start(str(machine.python), "-c", PLANTED, "after", "long")
    log = machine.out / "gpu.log"
    timely(
        lambda: log.exists() and "\nbegun\n" in log.read_text(),
        "the long step has begun",
        within_s=120,
    )
    ran.send_signal(signal.SIGTERM)
    assert ended(ran, "the killed run", within_s=120) == 128 + signal.SIGTERM
    after, long = machine.records()[1:]
    assert (after["rc"], after["last_line"]) == (0, "it runs")
    assert (long["rc"], long["last_line"]) == (128 + signal.SIGTERM, "begun")


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_kit_works_for_a_python_312_with_torch_and_triton(
    fake_cuda: Path, tmp_path: Path, show: Callable[[str], None]
) -> None:
    """Uses the wheel of `make gpu-kit`; builds it unless the kit has the same sources."""
    try:
        python = kit.python_312()
    except kit.KitError as missing:
        pytest.skip(str(missing))
    stated = kit.KIT / "core.sha256"
    if not stated.is_file() or stated.read_text().strip() != kit.core_digest():
        kit.build()
    [wheel] = kit.KIT.glob("r2serve-*.whl")
    show(f"{wheel.name}: {wheel.stat().st_size} bytes")
    assert wheel.stat().st_size < kit.MOST_BYTES
    subprocess.run([python, "-m", "venv", str(tmp_path / "python")], check=True)
    with_torch = tmp_path / "python/bin/python"
    pip = (str(with_torch), "-m", "pip", "install", "--quiet", "triton", "pytest", "numpy")
    release = metadata.version("torch")
    if subprocess.run([*pip, f"torch=={release}"], check=False).returncode != 0:
        # PyPI has no CPU build; the larger CUDA build works, too.
        subprocess.run([*pip, f"torch=={release.partition('+')[0]}"], check=True)
    machine = Machine(tmp_path, fake_cuda, with_torch)
    shutil.copytree(kit.KIT, machine.tree / "build/gpu-kit")
    steps = first_stages(machine, show)
    assert [(each["step"], each["rc"]) for each in steps[:4]] == [
        ("facts", 0),
        ("packages", 0),
        ("install", 0),
        ("import", 0),
    ]
