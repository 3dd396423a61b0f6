"""`make gpu-check`: steps, stages, captures and comparisons of results."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import captured
import pytest
import torch
from captured import Captured, Looks
from gpu_tools import FOLDER, ROOT, check, install, runs, stages, stepper
from timely import ended, timely

from r2serve.bench.kernels import replay

pytestmark = pytest.mark.slow

HERE = stages.Here(sys.executable, "libcuda_of_a_test.so", Path("/nonexistent"), on_gpu=False)
ON_GPU = dataclasses.replace(HERE, on_gpu=True)
# A step with a child; both write their process ids and then wait for a minute.
HANGS = """
import faulthandler, os, subprocess, time
faulthandler.enable()
def waits(): time.sleep(60)
child = subprocess.Popen(["sleep", "60"])
print(os.getpid(), child.pid, flush=True)
waits()
"""


def step(name: str, program: str, limit_s: float = 120.0) -> Any:
    return stepper.Step(name, (sys.executable, "-c", program), limit_s)


@pytest.fixture
def steps(tmp_path: Path) -> Iterator[Any]:
    """A stepper; the fixture restores signal handlers and the limit of core files."""
    core = resource.getrlimit(resource.RLIMIT_CORE)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield stepper.Stepper(tmp_path / "out", tmp_path, dict(os.environ))
    for number, handler in before.items():
        signal.signal(number, handler)
    resource.setrlimit(resource.RLIMIT_CORE, core)


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    timely(condition, "the expected state of the steps", within_s=seconds)


def test_a_hung_step_writes_a_traceback_and_is_killed_with_its_children(
    steps: Any, tmp_path: Path
) -> None:
    began = time.monotonic()
    hung = steps.run(step("hangs", HANGS, 10.0))
    took_s = time.monotonic() - began
    timely(lambda: took_s < 50, f"a step of 10 s took {took_s:.1f} s", within_s=0)
    assert (hung.rc, hung.failed) == (124, True)
    log = (tmp_path / "out/gpu.log").read_text()
    [pids] = [line.split() for line in log.splitlines() if line.replace(" ", "").isdigit()]
    assert not any(runs(int(pid)) for pid in pids)
    assert "in waits" in log
    assert "out of time after 10 s" in log
    assert steps.run(step("after", "print('it runs')")).last_line == "it runs"


def test_a_child_that_outlives_its_step_is_ended(steps: Any) -> None:
    program = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid)"
    ended = steps.run(step("leaves a child", program))
    assert ended.rc == 0
    assert not runs(int(ended.last_line))


def test_each_step_has_a_record_at_once(
    steps: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps.run(step("fails", "import sys; print('so it is'); sys.exit(3)"))
    steps.run(stepper.Step("none", ("/nonexistent/program",), 10.0))
    steps.run(step("crashes", "import os; os.abort()"))
    steps.skip("bench", "no GPU")
    said = [(each["step"], each["rc"], each["last_line"]) for each in records(tmp_path / "out")]
    assert said == [
        ("fails", 3, "so it is"),
        ("none", 127, said[1][2]),
        ("crashes", 134, ""),
        ("bench", None, "skipped: no GPU"),
    ]
    assert said[1][2].startswith("not started: [Errno 2] No such file")
    assert [each.failed for each in steps.outcomes] == [True, True, True, False]
    assert "fails        rc=3" in capsys.readouterr().out


def test_the_log_begins_with_the_kernel(steps: Any) -> None:
    assert steps.log.read_text() == f"{os.uname().release}\n"


DRIVE = f"""
import os, sys
from pathlib import Path
sys.path.insert(0, {str(FOLDER)!r})
from stepper import Step, Stepper
steps = Stepper(Path(sys.argv[1]), Path('/'), os.environ)
steps.run(Step('first', ('echo', 'done'), 10))
steps.run(Step('second', (sys.executable, '-c', {HANGS!r}), 60))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_results_are_complete_when_the_run_is_killed(
    number: signal.Signals, tmp_path: Path
) -> None:
    ran = subprocess.Popen([sys.executable, "-c", DRIVE, str(tmp_path)], stdout=subprocess.DEVNULL)
    log = tmp_path / "gpu.log"

    def pids() -> list[int]:
        """The two ids that HANGS prints; the log may end anywhere while it is written."""
        text = log.read_text() if log.exists() else ""
        found = re.search(r"^(\d+) (\d+)$\n", text, re.MULTILINE)
        return [int(each) for each in found.groups()] if found else []

    wait_until(lambda: len(pids()) == 2)
    left = pids()
    ran.send_signal(number)
    status = ended(ran, "the killed run", within_s=120)
    try:
        assert "\ndone\n" in log.read_text()
        assert records(tmp_path)[0]["step"] == "first"
        if number == signal.SIGTERM:
            assert status == 128 + number
            assert records(tmp_path)[1]["rc"] == status
            wait_until(lambda: not any(runs(pid) for pid in left))  # a killed process takes a while
    finally:
        for pid in filter(runs, left):
            os.kill(pid, signal.SIGKILL)


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    """nohup starts a program with SIGHUP ignored."""
    program = DRIVE.replace("'echo', 'done'", "'sh', '-c', 'kill -HUP $PPID; echo done'")
    program = program[: program.index("steps.run(Step('second'")]
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        ran = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    finally:
        signal.signal(signal.SIGHUP, handler)
    assert ran.returncode == 0
    assert (records(tmp_path)[0]["step"], records(tmp_path)[0]["rc"]) == ("first", 0)


def run_check(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FOLDER / "check.py"), *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_without_a_gpu_the_check_is_skipped() -> None:
    done = run_check("--library", "libcuda_of_no_machine.so.1")
    assert (done.returncode, done.stdout) == (77, "no GPU here: nothing was checked\n")


def test_vllms_missing_requirements_are_listed_before_anything_is_installed(
    fake_cuda: Path, tmp_path: Path
) -> None:
    done = run_check("install", "vllm", f"--library={fake_cuda}", f"--out={tmp_path}")
    assert done.returncode == 1
    steps_run = [(each["step"], each["rc"]) for each in records(tmp_path) if "step" in each]
    assert steps_run == [("vllm-needs", 78), ("install", None), ("vllm", None)]
    assert "missing: vllm" in done.stdout
    assert "missing: r2serve" not in done.stdout


def test_without_a_gpu_vllms_missing_requirements_are_listed() -> None:
    done = run_check("vllm", "--library", "libcuda_of_no_machine.so.1")
    assert done.returncode == 77
    assert "missing: GPU: found no CUDA driver" in done.stdout


def test_an_unknown_stage_is_refused() -> None:
    done = run_check("pear")
    assert done.returncode == 2
    assert "stages: pear; right: facts, install, pair," in done.stderr


def test_the_commit_comes_from_a_variable_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert check.commit() == "unknown"
    monkeypatch.setenv("R2SERVE_COMMIT", "abc1234")
    assert check.commit() == "abc1234"


def test_stages_that_need_a_gpu_are_skipped_without_one(steps: Any) -> None:
    for name in ("bench", "replay", "memcheck", "vllm"):
        check.run(steps, name, HERE)
    assert [each.last_line for each in steps.outcomes] == ["skipped: no GPU"] * 4


def test_a_missing_sanitizer_is_skipped(steps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    check.run(steps, "memcheck", ON_GPU)
    assert steps.outcomes[0].last_line == "skipped: no compute-sanitizer in PATH"


def test_hung_ranks_write_tracebacks_before_all_end(monkeypatch: pytest.MonkeyPatch) -> None:
    smoke = importlib.import_module("smoke")
    started: list[list[str]] = []

    class Rank:
        def __init__(self, command: list[str]) -> None:
            started.append(command)

        def wait(self) -> int:
            return 0

    monkeypatch.setattr(smoke.subprocess, "Popen", Rank)
    monkeypatch.setattr(smoke.faulthandler, "dump_traceback_later", lambda *_, **__: None)
    monkeypatch.setattr(sys, "argv", ["smoke.py", "node", "--limit-s=100"])
    assert smoke.main() == 0
    assert len(started) == 4
    for command in started:
        assert [word for word in command if "limit" in word][-1] == "--limit-s=80.0"


def test_after_a_failed_step_its_stage_ends_and_the_next_runs(
    steps: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def two(here: Any) -> list[Any]:
        return [step("one", "raise SystemExit(1)"), step("two", "print('never')")]

    monkeypatch.setitem(stages.STAGES, "two", stages.Stage(two, ""))
    monkeypatch.setitem(stages.STAGES, "next", stages.Stage(lambda _: [step("next", "")], ""))
    check.run(steps, "two", HERE)
    check.run(steps, "next", HERE)
    assert [(each.step, each.rc) for each in steps.outcomes] == [
        ("one", 1),
        ("two", None),
        ("next", 0),
    ]


def all_steps() -> dict[str, Any]:
    made = [each for stage in stages.STAGES.values() for each in stage.steps(HERE)]
    return {each.name: each for each in made}


def test_modules_are_loaded_early_only_if_ranks_share_a_process() -> None:
    eager = {
        name for name, each in all_steps().items() if "CUDA_MODULE_LOADING" in each.environment
    }
    assert eager == {"pair", "arrival", "device", "replay", "bench"}


def test_the_sanitizer_runs_no_waiting_kernel() -> None:
    command = all_steps()["memcheck"].command
    files = [word for word in command if word.endswith(".py")]
    assert files
    assert command[command.index("-k") + 1] == "not arrival"
    for name in files:
        text = (ROOT / name).read_text()
        assert "arrival=" not in text, name


def test_without_vllm_and_a_build_all_fits_into_half_an_hour() -> None:
    stages_s = sum(each.limit_s for name, each in all_steps().items() if "vllm" not in name)
    assert stages_s + 3 * install.STEP_S < 1800


def test_all_limits_are_shorter_than_ten_minutes_but_the_demo_s() -> None:
    assert {name for name, each in all_steps().items() if each.limit_s > 600} == {"vllm"}


# ---- one capture at a time ----


@pytest.mark.parametrize("capture", ["bench", "tests"])
def test_one_thread_captures_at_a_time(capture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, most = [0], [0]
    changes = threading.Lock()

    @contextmanager
    def graph(*_: object, **__: object) -> Iterator[None]:
        with changes:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        yield
        with changes:
            inside[0] -= 1

    class Stream:
        def synchronize(self) -> None: ...

    class Graph:
        def replay(self) -> None: ...

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(captured, "HAS_GPU", True)
    how: Any = replay.capture_on_gpu if capture == "bench" else lambda c, b: Captured(c, "", b)
    together = threading.Barrier(3)

    def rank(_: int) -> None:
        together.wait(120)
        how(None, lambda: time.sleep(0.1))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(rank, range(3)))
    assert most == [1]


# ---- results are compared on the device ----


def test_a_wrong_result_is_named_by_its_turn() -> None:
    looks, right = Looks(torch.device("cpu")), torch.ones(3)
    for turn in range(199):
        looks.compare(right, 2 * right if turn == 157 else right)
        looks.compare(right, right)
        looks.end_turn()
    looks.compare(right, 2 * right)
    with pytest.raises(AssertionError, match=r"wrong results in turns \[157, 199\]"):
        looks.end_turn()
    last = Looks(torch.device("cpu"))
    last.compare(right, 2 * right)
    last.end_turn()
    with pytest.raises(AssertionError, match=r"turns \[0\]"):
        last.look()


def test_the_host_reads_results_once_in_a_hundred_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    read = [0]
    tolist = torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> Any:
        read[0] += 1
        return tolist(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    for name in ("item", "__bool__"):
        monkeypatch.setattr(torch.Tensor, name, None)  # either would wait for the device
    looks, right = Looks(torch.device("cpu")), torch.ones(3)
    for _ in range(1000):
        looks.compare(right, right)
        looks.end_turn()
    assert read == [10]
