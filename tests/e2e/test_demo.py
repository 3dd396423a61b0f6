"""`r2serve demo` with a real engine: the report, and the clean-up of processes and files."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from demo_reports import check_report
from timely import patience, timely

from r2serve.lab.serving import workdir

DEMO = [sys.executable, "-c", "from r2serve.cli import main; main()", "demo"]

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.timeout(1500),
]
WHOLE_S = 900.0  # a demo takes 5 minutes on two busy cores
ENDS_S = 120.0
LATE = (
    *("no answer within", "tokens after", "no token for", "decoding ended before"),
    "no rail had traffic",
)
"""Parts of the problems that a starved machine causes."""
CUT_SHORT = ("no request was sent", "tokens were not compared", "fault was not made")
"""Parts of the problems that follow from a problem of LATE."""


def _processes() -> list[tuple[Path, str]]:
    """Returns the /proc directory and the command line of every process."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):  # the process has just ended
                words = (path / "cmdline").read_bytes().decode(errors="replace")
                found.append((path, words.replace("\0", " ")))
    return found


def _of_demo(pid: int) -> list[tuple[Path, str]]:
    """Returns the lab processes of demo `pid`, and all processes in the demo's directory."""
    marks = (f"r2serve-lab-{pid}-", f"r2serve-demo-{pid}-")
    return [(path, words) for path, words in _processes() if any(mark in words for mark in marks)]


def leftovers(pid: int) -> list[str]:
    return [words for _, words in _of_demo(pid)]


class Namespaces:
    """Network namespaces of a demo, kept open.

    The kernel gives the number of a removed namespace to the next one, perhaps of a test beside
    this test. An open namespace keeps its number.
    """

    def __init__(self, pid: int) -> None:
        """Opens all network namespaces created by demo `pid`."""
        own = os.readlink("/proc/self/ns/net")
        self._open: dict[str, int] = {}
        for path, _ in _of_demo(pid):
            with contextlib.suppress(OSError):  # the process has just ended
                descriptor = os.open(path / "ns" / "net", os.O_RDONLY | os.O_CLOEXEC)
                name = os.readlink(f"/proc/self/fd/{descriptor}")
                if name == own or name in self._open:
                    os.close(descriptor)
                else:
                    self._open[name] = descriptor

    def __len__(self) -> int:
        return len(self._open)

    def users(self) -> list[str]:
        """Returns the command lines of processes in these namespaces; call once, at the end."""
        found = []
        for path, words in _processes():
            with contextlib.suppress(OSError):
                if os.readlink(path / "ns" / "net") in self._open:
                    found.append(f"{path.name}: {words}")
        for descriptor in self._open.values():
            os.close(descriptor)
        return found


def directories(pid: int) -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"r2serve-demo-{pid}-*"))


def wait_until_clean(pid: int, patience_s: float = 60.0) -> list[str]:
    """Returns the processes that remain: a killed process needs time to end."""
    deadline = time.monotonic() + patience_s * patience()
    while leftovers(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    return leftovers(pid)


def output_of(demo: subprocess.Popen[str], within_s: float) -> str:
    """Waits for the end of a demo, and returns the rest of the output."""
    limit_s = within_s * patience()
    try:
        output, _ = demo.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired as hang:
        demo.kill()
        demo.wait()
        so_far = (hang.output or b"").decode(errors="replace")
        pytest.fail(f"the demo did not end within {limit_s:g} s:\n{so_far[-8000:]}")
    return output


def reach_engine_start(*options: str) -> subprocess.Popen[str]:
    """Starts a demo, and returns the demo some seconds after the start of its engines."""
    demo, _ = start_and_reach("starting vllm serve", *options)
    timely(lambda: any("vllm" in words for words in leftovers(demo.pid)), "vllm serve", ENDS_S)
    time.sleep(8)
    return demo


def check_in_time(report: Path, output: str) -> None:
    """Raises TimingMiss if the report has problems of a starved machine, and no other problem."""
    problems: list[str] = []
    if report.exists():
        problems = json.loads(report.read_text(encoding="utf-8"))["problems"]

    def only(*texts: str) -> list[str]:
        return [each for each in problems if any(text in each for text in texts)]

    late = only(*LATE) and only(*LATE, *CUT_SHORT) == problems
    timely(lambda: not late, output[-4000:], within_s=0)


def start_and_reach(
    text: str, *options: str, report: Path | None = None
) -> tuple[subprocess.Popen[str], str]:
    """Starts a demo, waits for `text` in the output; returns the demo and the output so far.

    report: the file with the demo's report, to tell a late demo from another failure.
    """
    command = [*DEMO, *options]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert demo.stdout is not None
    seen = ""
    for line in demo.stdout:
        seen += line
        if text in line:
            return demo, seen
    if report is not None:
        check_in_time(report, seen)
    pytest.fail(f"the demo ended before {text!r}:\n{seen}")


def run_demo(tmp_path: Path, *options: str) -> tuple[dict[str, object], str]:
    """Runs a demo to the end, checks the clean-up, and returns report and output."""
    report, logs = tmp_path / "report.json", tmp_path / "logs"
    keep = ("--json", str(report), "--keep-logs", str(logs))
    demo, begin = start_and_reach("reference", *keep, *options, report=report)
    namespaces = Namespaces(demo.pid)
    output = begin + output_of(demo, WHOLE_S)
    check_in_time(report, output)
    assert demo.returncode == 0, output
    assert wait_until_clean(demo.pid) == []
    assert directories(demo.pid) == []
    assert namespaces.users() == []
    assert (logs / "r2ccl-node0.log").stat().st_size > 0
    data: dict[str, object] = json.loads(report.read_text(encoding="utf-8"))
    return data, output


@pytest.mark.alone
@pytest.mark.usefixtures("forked_vllm")
def test_every_request_survives_both_faults(tmp_path: Path) -> None:
    data, output = run_demo(tmp_path)
    check_report(data, sent=8)
    management = data["management"]
    assert isinstance(management, dict)
    assert management["longest_gap_ms"] < 1e3 * management["away_s"]
    assert "8 of 8" in output
    assert "identical" in output


@pytest.mark.long
def test_every_request_survives_with_engines_started_as_users_do(tmp_path: Path) -> None:
    data, _ = run_demo(tmp_path)
    check_report(data, sent=8)


@pytest.mark.long
def test_without_namespaces_the_faults_are_made_in_the_engine(tmp_path: Path) -> None:
    data, output = run_demo(tmp_path, "--no-namespaces", "--requests", "4")
    check_report(data, sent=4)
    assert data["management"] is None
    assert "R2CCL_NODE=per-rank" in output


@pytest.mark.long
def test_nodes_may_be_servers_of_the_same_machine(tmp_path: Path) -> None:
    """A machine with a single GPU uses this layout."""
    options = ("--no-namespaces", "--servers", "2", "--requests", "4")
    data, output = run_demo(tmp_path, *options)
    # A rail cut between two calls causes no stall.
    assert data["requests"] == {"sent": 4, "completed": 4, "failed": 0}
    assert data["tokens_identical"] is True
    assert output.count("; healed") == 2


@pytest.mark.long
def test_the_baseline_runs_the_stock_communicator(
    tmp_path: Path, show: Callable[[str], None]
) -> None:
    data, output = run_demo(tmp_path, "--baseline")
    check_report(data, sent=8)
    assert "stock communicator" in output
    baseline, ours = data["baseline"], data["decode_step_ms"]
    assert isinstance(baseline, dict)
    assert isinstance(ours, float)
    # The two communicators run in sequence, so the times are not compared here.
    show(f"decode step: {ours:.1f} ms, stock {baseline['decode_step_ms']:.1f} ms")
    assert ours > 0
    assert baseline["decode_step_ms"] > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_cleans_up(number: signal.Signals) -> None:
    demo = reach_engine_start()
    namespaces = Namespaces(demo.pid)
    assert len(namespaces) == 3  # of the switch and of two nodes
    assert directories(demo.pid)
    demo.send_signal(number)
    output = output_of(demo, ENDS_S)
    assert demo.returncode == 130, output
    assert wait_until_clean(demo.pid) == []
    assert directories(demo.pid) == []
    assert namespaces.users() == []


def test_the_next_start_removes_the_files_of_a_killed_demo() -> None:
    demo = reach_engine_start()
    namespaces = Namespaces(demo.pid)
    demo.kill()
    output_of(demo, ENDS_S)
    assert wait_until_clean(demo.pid) == []
    assert namespaces.users() == []
    assert directories(demo.pid), "a killed process cannot remove its directory"
    workdir.sweep()
    assert directories(demo.pid) == []
