"""The gate of `make test`: defects are final, late tests run again, and a hang costs one test."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import gate_stages
import hangs
import pytest
from timely import PATIENCE_VARIABLE, TimingMiss, ended, patience, stop, timely

TESTS = Path(__file__).resolve().parents[1]

PREAMBLE = """
import ctypes, importlib.util, os, signal, subprocess, sys, threading, time
from pathlib import Path
import hangs
import pytest
from timely import TimingMiss, timely

hangs.REACTION_S = float(os.environ["REACTION_S"])

def first_time(name):
    marker = Path(os.environ["PLANTED"], name)
    if marker.exists():
        return False
    marker.write_text("")
    return True

def stopped_for_3_s(process):
    process.send_signal(signal.SIGSTOP)
    threading.Timer(3.0, process.send_signal, [signal.SIGCONT]).start()
"""
# A process that answers stands for a rank; `make test-long` has ranks of r2ccl.
WAKES_LATE = """
@pytest.mark.parametrize("number", range(10))
def test_answers(number):
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        began = time.monotonic()
        if number in (3, 7) and first_time(f"stop-{number}"):
            stopped_for_3_s(rank)
        rank.stdin.write(b"step\\n")
        rank.stdin.flush()
        assert rank.stdout.readline() == b"step\\n"
        took_s = time.monotonic() - began
        timely(lambda: took_s < 2.9, f"the answer took {took_s:.1f} s", within_s=0)
"""
RANK_WAKES_LATE = """
spec = importlib.util.spec_from_file_location("rank_fixtures", os.environ["RANK_FIXTURES"])
sys.modules[spec.name] = fixtures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fixtures)
jobs = fixtures.jobs

@pytest.mark.parametrize("number", range(10))
def test_steps(jobs, number):
    ranks = jobs.start("stream.py", 2)
    for rank in ranks:
        assert "ready" in rank.hear(60)
    began = time.monotonic()
    if number in (3, 7) and first_time(f"stop-{number}"):
        stopped_for_3_s(ranks[1].process)
    before = ranks[0].ask({"do": "steps"})
    timely(lambda: ranks[0].ask({"do": "steps"}) > before + 100, "100 more steps")
    took_s = time.monotonic() - began
    assert ranks[0].ask({"do": "stop"}) is None
    for rank in ranks:
        said = rank.hear(60)
        assert "steps" in said, said  # no error, no wrong bit
    timely(lambda: took_s < 2.9, f"100 steps took {took_s:.1f} s", within_s=0)
"""
LATE_ONCE = """
def test_late_once(): timely(lambda: not first_time("late"), "a wake-up", within_s=0)
"""
DEFECTS = """
def test_always_late(): timely(lambda: False, "an answer", within_s=0)

def test_wrong_bit(): assert not first_time("bit"), "bit 3 of element 7 differs"

@pytest.fixture
def checked():
    yield
    assert not first_time("request"), "request 4 was lost"

def test_late_and_wrong(checked): timely(lambda: not first_time("both"), "a wake-up", within_s=0)

def test_crashes():
    if first_time("crash"): ctypes.string_at(0)

def test_skips(): pytest.skip("no second NIC")

@pytest.mark.timeout(1)
def test_hangs():
    if first_time("hang"): wait_for_a_lost_message()

def wait_for_a_lost_message():
    while True: time.sleep(1)

def test_after_the_hang(): pass
"""
HANG = """
@pytest.mark.timeout(1)
def test_hangs():
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2): ctypes.CDLL(None).pthread_mutex_lock(mutex)  # no signal ends a deadlock
def test_after(): pass
"""
SHORT_OF_MEMORY = """
def test_is_killed():
    Path("kills").write_text("1")
    os.kill(os.getpid(), signal.SIGKILL)

def test_after():
    time.sleep(3)  # the counter of kills is read each second
    assert False, "element 7 differs"
"""
MANY_LATE = "".join(
    f'def test_late_{each}(): timely(lambda: not first_time("{each}"), "x", within_s=0)\n'
    for each in range(4)
)

DRIVER = """
import sys
from pathlib import Path
import gate
root = Path(sys.argv[1])
kills = root / "kills"
gate.strain.memory_kills = lambda: int(kills.read_text()) if kills.exists() else 0
gate.timings.FILE = root / "timings.json"
known = (
    gate.Stage(
        "native", 60, target="native-asan", variant="asan", hang_s=float(sys.argv[4]),
    ),
    gate.Stage(
        "python", float(sys.argv[3]), pytest=("-n", "1", "test_planted.py"),
    ),
)
sys.exit(gate.main(["--keep-going", *sys.argv[2].split()], root, known))
"""


def run_gate(
    folder: Path,
    tests: str,
    *,
    stages: str = "python",
    budget_s: float = 200.0,
    hang_s: float = 60.0,
) -> tuple[int, str]:
    """Runs the gate over planted tests; returns the exit status and the output."""
    (folder / "test_planted.py").write_text(PREAMBLE + tests)
    (folder / "pytest.ini").write_text("[pytest]\ntimeout_method = signal\n")
    (folder / "planted").mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(folder), stages, str(budget_s), str(hang_s)],
        cwd=folder,
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "GATE_"))},
            "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS / "e2e"), str(TESTS / "unit")]),
            "PYTEST_ADDOPTS": "-p conftest -p no:cacheprovider -p no:schemathesis -p no:cloudcoil",
            "PLANTED": str(folder / "planted"),
            # Long enough for the stacks, and shorter than the limit of the watchdog.
            "REACTION_S": str(min(8 * patience(), hangs.DEATH_S / 2)),
            "RANK_FIXTURES": str(TESTS / "e2e" / "conftest.py"),
            PATIENCE_VARIABLE: "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=400,
    )
    return done.returncode, done.stdout


def unstable(folder: Path) -> list[dict[str, str]]:
    return list(json.loads((folder / "build" / "results" / "unstable.json").read_text()))


def failures(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("FAILURE ")]


def check_late_twice(folder: Path, tests: str) -> None:
    """Checks a run with two late wake-ups in ten tests."""
    record = folder / "gate.jsonl"
    status, output = run_gate(folder, tests, stages=f"python --record {record}")
    assert status == 0, output
    assert output.splitlines()[-1] == "10 passed, 0 failed, 0 skipped"
    assert "UNSTABLE: 2" in output
    rows = unstable(folder)
    assert [row["test"].partition("[")[2] for row in rows] == ["3]", "7]"]
    for row in rows:
        assert row["again"] == "passed"
        assert "took" in row["message"]
        assert "load" in row["machine"]
        assert "longest pause" in row["machine"]
    (recorded,) = map(json.loads, record.read_text().splitlines())
    assert recorded["unstable"] == rows
    assert set(recorded["seconds"]) == {"python", "once more"}
    assert recorded["commit"] == gate_stages.git("rev-parse", "HEAD")


@pytest.mark.slow
def test_a_late_wake_up_runs_again_alone_and_is_shown(tmp_path: Path) -> None:
    check_late_twice(tmp_path, WAKES_LATE)


@pytest.mark.long
def test_a_rank_that_wakes_up_late_fails_no_run(tmp_path: Path) -> None:
    check_late_twice(tmp_path, RANK_WAKES_LATE)


@pytest.mark.slow
def test_a_defect_is_final_and_a_hang_costs_one_test(tmp_path: Path) -> None:
    status, output = run_gate(tmp_path, LATE_ONCE + DEFECTS)
    assert status == 1, output
    expected = {
        "test_wrong_bit": "bit 3 of element 7 differs",
        "test_late_and_wrong": "request 4 was lost",
        "test_crashes": "crashed",
        "test_hangs": "Timeout",
        "test_skips": "unexpected skip: no second NIC",
        "test_always_late": "late, and failed again alone",
    }
    lines = failures(output)
    assert len(lines) == len(expected), output
    for name, text in expected.items():
        (line,) = (each for each in lines if f"::{name}" in each)
        assert text in line
    again = {row["test"].partition("::")[2]: row["again"] for row in unstable(tmp_path)}
    assert again == {"test_late_once": "passed", "test_always_late": "failed"}
    assert "wait_for_a_lost_message" in output.partition("  stacks: ")[2]
    assert output.splitlines()[-1] == "2 passed, 6 failed, 1 skipped"


@pytest.mark.long
def test_more_late_tests_than_three_fail_the_run(tmp_path: Path) -> None:
    status, output = run_gate(tmp_path, MANY_LATE)
    assert status == 1
    assert "4 late tests, more than 3: none was run again" in output
    assert len(unstable(tmp_path)) == 4


@pytest.mark.long
def test_a_process_that_ignores_its_time_out_is_killed(tmp_path: Path) -> None:
    status, output = run_gate(tmp_path, HANG)
    assert status == 1
    assert "killed after its time limit: test_planted.py::test_hangs" in output
    assert output.splitlines()[-1] == "1 passed, 1 failed, 0 skipped"


@pytest.mark.long
def test_a_stage_beyond_its_budget_is_killed_and_names_the_test(tmp_path: Path) -> None:
    status, output = run_gate(tmp_path, HANG.replace("timeout(1)", "timeout(500)"), budget_s=60)
    assert status == 1
    assert "FAILURE python: still running after its 60 s, killed" in output
    assert "FAILURE python: was running test_planted.py::test_hangs" in output


@pytest.mark.long
def test_a_kill_for_want_of_memory_is_no_verdict_but_a_defect_beside_it_is(tmp_path: Path) -> None:
    status, output = run_gate(tmp_path, SHORT_OF_MEMORY)
    assert status == 1
    (line,) = failures(output)
    assert "element 7 differs" in line
    (line,) = (each for each in output.splitlines() if each.startswith("UNDETERMINED "))
    assert "test_is_killed" in line
    assert output.splitlines()[-1] == "0 passed, 1 failed, 0 skipped, 1 undetermined"


# Programs run by CTest: a use after a free, found by AddressSanitizer, and an overflow, found by
# UndefinedBehaviorSanitizer. The second program goes on after the report, and passes.
FREED = """
#include <cstdlib>
int read_after_the_end(const int* rails) { return rails[1]; }
int main(int argc, char**) {
  int* rails = static_cast<int*>(std::malloc(16));
  rails[1] = argc;
  std::free(rails);
  return read_after_the_end(rails) == 7;
}
"""
OVERFLOW = """
int next(int rail) { return rail + 2147483647; }
int main(int argc, char**) { return next(argc) == 7; }
"""


# A thread waits without an end. Some kernels let ancestors alone read stacks, and gdb is none.
HUNG = """
#include <pthread.h>
#include <sys/prctl.h>
#include <unistd.h>
void* wait_for_a_lost_message(void*) {
  for (;;) pause();
}
int main() {
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
  pthread_t rail;
  pthread_create(&rail, nullptr, wait_for_a_lost_message, nullptr);
  return pthread_join(rail, nullptr);
}
"""


def plant_native(folder: Path, source: str, flags: str, *arguments: str) -> None:
    """Plants a stage that compiles a program, and runs the program before `link_test_0`."""
    (folder / "rail.cc").write_text(source)
    build = folder / "build" / "native-asan"
    build.mkdir(parents=True)
    program = build / "rail_test"
    words = " ".join(f'"{each}"' for each in (program, *arguments))
    (build / "CTestTestfile.cmake").write_text(
        f'add_test(rail_test_0 {words})\nadd_test(link_test_0 "/bin/true")\n'
    )
    (folder / "Makefile").write_text(
        "native-asan:\n"
        f"\tg++ -g -O0 -w {flags} rail.cc -o {program}\n"
        f"\tctest --test-dir {build} --output-on-failure\n"
    )


def test_a_native_hang_is_shown_with_its_stacks_and_costs_one_program(tmp_path: Path) -> None:
    plant_native(tmp_path, HUNG, "-pthread", "--gtest_output=xml:results/rail_test_0.xml")
    status, output = run_gate(tmp_path, "", stages="native", hang_s=3.0)
    assert status == 1, output
    line = "FAILURE native: rail_test_0: hung, and was killed at its time limit"
    assert failures(output) == [line]
    below = output.partition(line)[2]
    assert "build/results/stacks/native-rail_test_0.txt" in below
    # Without gdb, the report names the place in the kernel only.
    assert ("wait_for_a_lost_message" in below) == (shutil.which("gdb") is not None), below
    assert "killed after its time limit: native: rail_test_0" in below
    assert "50% tests passed, 1 tests failed out of 2" in output


def run_sanitized(folder: Path, source: str, sanitizer: str) -> tuple[str, str]:
    """Runs the gate over a red program; returns the line of its failure, and the lines below."""
    plant_native(folder, source, f"-fsanitize={sanitizer}")
    status, output = run_gate(folder, "", stages="native")
    assert status == 1, output
    (line,) = failures(output)
    assert line.startswith("FAILURE native: rail_test_0: ")
    return line, output.partition(line)[2]


def test_a_sanitizers_report_is_shown_with_its_stack(tmp_path: Path) -> None:
    line, below = run_sanitized(tmp_path, FREED, "address")
    assert "ERROR: AddressSanitizer: heap-use-after-free" in line
    assert "in read_after_the_end(int const*)" in below


def test_a_program_that_passes_with_a_sanitizers_report_is_a_failure(tmp_path: Path) -> None:
    line, below = run_sanitized(tmp_path, OVERFLOW, "undefined")
    assert "runtime error: signed integer overflow: 1 + 2147483647" in line
    assert "rail.cc:2" in below


NATIVE_REPORT = """<testsuites><testsuite name="Rail">
<testcase classname="Rail" name="Passes" status="run" result="completed"/>
<testcase classname="Rail" name="Fails" status="run" result="completed">
<failure message="rail_test.cc:7&#x0A;1 is not 2"/></testcase>
<testcase classname="Rail" name="Skips" status="run" result="skipped">
<skipped message="rail_test.cc:7&#x0A;no second NIC"/></testcase>
</testsuite></testsuites>
"""


def test_native_failures_are_listed_by_case_and_crashes_by_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = "build/native-asan/Testing/Temporary"
    (tmp_path / "report.xml").write_text(NATIVE_REPORT)
    (tmp_path / "Makefile").write_text(
        "native-asan:\n"
        f"\tmkdir -p build/results/asan {logs}\n"
        "\tcp report.xml build/results/asan/rail_test_0.xml\n"
        f"\tprintf '1:rail_test_0\\n2:link_test_0\\n' >{logs}/LastTestsFailed.log\n"
        "\texit 8\n"
    )
    ctest = tmp_path / "bin" / "ctest"
    ctest.parent.mkdir()
    ctest.write_text("#!/bin/sh\n")
    ctest.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ctest.parent}:{os.environ['PATH']}")
    status, output = run_gate(tmp_path, "", stages="native")
    assert status == 1
    assert failures(output) == [
        "FAILURE native: rail_test_0: Rail.Fails: rail_test.cc:7 1 is not 2",
        "FAILURE native: link_test_0: no report: it crashed, or exceeded its time",
        "FAILURE rail_test_0: Rail.Skips: unexpected skip: no second NIC",
    ]
    assert "skipped: 1: no second NIC" in output
    assert "1 passed, 3 failed, 1 skipped" in output


def test_an_unknown_stage_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, str(TESTS / "gate.py"), "unti"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2
    assert "unknown stage unti; there are lint, plain, unit," in done.stderr


def test_a_wait_is_multiplied_by_the_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATIENCE_VARIABLE, "3")
    with pytest.raises(TimingMiss, match=r"not within 0\.3 s: a rail is UP"):
        timely(lambda: False, "a rail is UP", within_s=0.1)
    assert timely(lambda: 7, "a value", within_s=0) == 7


def test_a_process_that_runs_on_is_late_and_then_killed() -> None:
    with subprocess.Popen(["sleep", "100"]) as process:
        with pytest.raises(TimingMiss, match="still running after"):
            ended(process, "a sleeper", within_s=0.05)
        with pytest.warns(UserWarning, match=rf"a sleeper \(process {process.pid}\) did not end"):
            stop(process, "a sleeper", grace_s=0.05)
        assert process.returncode == -9
