"""Limits of tests, the outcome of a run, and fixtures of all folders."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty
from typing import Any

import cases
import hangs
import hypothesis
import pytest
from forked import BESIDE_VLLM, TORCH, Forks
from timely import TimingMiss, patience

ROOT = Path(__file__).resolve().parents[1]

# The same examples in each run, and no limit for the time of an example.
hypothesis.settings.register_profile("gate", deadline=None, derandomize=True)
hypothesis.settings.load_profile("gate")


LIMITS_S = {"engines": 1500.0, "e2e": 600.0, "kernels": 400.0, "unit": 400.0}
"""Time limit of a test by folder, with set-up and teardown; a marker `timeout` may raise it."""
RECORD_VARIABLE = "R2SERVE_RECORD"
LATE = "late"
"""Property of a report whose test failed with nothing but TimingMiss."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcome", metavar="FILE", help="save passed, failed and late tests as JSON")
    parser.addoption("--cases", action="store_true", help="print a row for each field case")
    parser.addoption(
        "--machines", action="store_true", help="print start line and doctor of a case's machines"
    )


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Restores the environment after a test: vLLM's plugin sets variables for its workers."""
    before = dict(os.environ)
    yield
    now = set(os.environ) - {"PYTEST_CURRENT_TEST"}  # pytest sets and clears this variable
    for name in now - set(before):
        del os.environ[name]
    for name, value in before.items():
        if name != "PYTEST_CURRENT_TEST" and os.environ.get(name) != value:
            os.environ[name] = value


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Returns a function for the messages logged by r2serve.

    Messages of vLLM and torch are left out: their number depends on the order of the tests.
    """
    return lambda: [
        each.getMessage() for each in caplog.records if each.name.partition(".")[0] == "r2serve"
    ]


@pytest.fixture
def show(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Prints a line at the end of the test, also if the test passes."""

    def say(line: str) -> None:
        request.node.user_properties.append(("shown", line))

    return say


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Appends the figures of the test, a line of JSON, to the file ``$R2SERVE_RECORD``, if set."""

    def add(**figures: object) -> None:
        file = os.environ.get(RECORD_VARIABLE, "")
        if not file:
            return
        from r2serve.bench.collectives import machine

        row = {
            "test": request.node.nodeid,
            "commit": machine.commit(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "cpu": machine.cpu_model(),
            "cores": os.cpu_count(),
            **figures,
        }
        with Path(file).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")

    return add


def limit_s(item: pytest.Item) -> float:
    """Returns the time limit of a test in seconds."""
    marker = item.get_closest_marker("timeout")
    own = float(marker.args[0]) if marker else 0.0
    return max(own, LIMITS_S.get(top_folder(item.path), 0.0 if own else 400.0)) * patience()


def top_folder(path: Path) -> str:
    """Returns the folder of `tests` that contains a file, also for files in deeper folders."""
    try:
        return path.relative_to(ROOT / "tests").parts[0]
    except ValueError:  # a file elsewhere
        return ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--cases"):
        items[:] = cases.numbered(items)
    # The watchdog stores the stacks before pytest interrupts the test.
    for item in items:
        limit = limit_s(item)
        item.stash[LIMIT] = limit
        cases.note(item)
        item.add_marker(pytest.mark.timeout(limit + hangs.REACTION_S), append=False)


LIMIT = pytest.StashKey[float]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with hangs.note(item.nodeid, item.stash[LIMIT]):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.excinfo is not None and is_late(call.excinfo.value):
        report.user_properties.append((LATE, str(call.excinfo.value)))
    return report


def is_late(error: BaseException) -> bool:
    """Whether an error is a TimingMiss that replaced no error but time-outs."""
    if not isinstance(error, TimingMiss):
        return False
    before = error.__context__
    while before is not None:
        if not isinstance(before, TimingMiss | TimeoutError | subprocess.TimeoutExpired | Empty):
            return False
        before = before.__context__
    return True


class Report:
    """Reports the lines of `show`, and saves the outcome of the tests.

    Workers of pytest-xdist send their reports to the main process. Only the main process has a
    Report.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._plugins = config.pluginmanager
        self._file: str | None = config.getoption("--outcome")
        self._passed = 0
        self._skipped: dict[str, str] = {}
        self._failed: dict[str, str] = {}
        self._times: dict[str, tuple[float | None, float]] = {}
        self._late: dict[str, dict[str, Any]] = {}
        self._seconds: dict[str, float] = {}
        self._crashed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        # The report of a test whose process crashed has no times.
        started, _ = self._times.get(report.nodeid, (report.start or None, 0.0))
        self._times[report.nodeid] = (started, report.stop or time.time())
        terminal = self._plugins.get_plugin("terminalreporter")
        if report.when == "teardown" and terminal is not None:
            for name, line in report.user_properties:
                if name == "shown":
                    terminal.write_line(f"\n    {line}")
        late = dict(report.user_properties).get(LATE)
        if report.failed and late is not None:
            self._late[report.nodeid] = {
                "name": report.nodeid,
                "message": late,
                "started": report.start,
                "stopped": report.stop,
            }
        elif report.failed:
            self._failed[report.nodeid] = f"{report.when}: {last_line(report)}"
        elif report.skipped:
            self._skipped[report.nodeid] = skip_reason(report)
        elif report.when == "call":
            self._passed += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failed[report.nodeid] = f"collection: {last_line(report)}"
        elif report.skipped:
            self._skipped[report.nodeid] = skip_reason(report)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Called by pytest-xdist at the end of a worker; `error`: the worker crashed."""
        if error:
            self._crashed.add(node.gateway.id)

    def pytest_sessionfinish(self) -> None:
        # A worker that crashes beside a test is named by the test's report.
        for worker in self._crashed:
            if not any(f"'{worker}'" in text for text in self._failed.values()):
                self._failed[f"worker {worker}"] = "crashed outside a test"
        if self._file is None:
            return
        found = {
            "passed": self._passed,
            "skipped": list(self._skipped.items()),
            "failed": [self._failure(name) for name in self._failed],
            # A test with another failure, too, is no late test.
            "late": [row for name, row in self._late.items() if name not in self._failed],
            "seconds": {name: round(each, 2) for name, each in self._seconds.items()},
        }
        Path(self._file).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    def _failure(self, name: str) -> dict[str, Any]:
        started, stopped = self._times.get(name, (None, None))
        message = self._failed[name]
        return {"nodeid": name, "message": message, "started": started, "stopped": stopped}


def last_line(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Returns the error of a failed report in a line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else report.longreprtext
    lines = [each for each in str(text).splitlines() if each.strip()]
    return " ".join(lines[:4])[:400] if crash is not None else " ".join(lines[-2:])[:400]


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Report(config))
        if config.getoption("--cases"):
            config.pluginmanager.register(cases.Cases())


@pytest.fixture(scope="session")
def fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the fake CUDA driver, a library loaded instead of `libcuda.so.1`; needs no GPU."""
    from r2serve import _core

    if not _core.has_kernels():
        pytest.skip("no nvcc when r2serve was installed")
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        # shared by all workers of this run, so only the first worker compiles
        folder = folder.parent
    made = folder / "libfake_cuda.so"
    with (folder / "libfake_cuda.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            fresh = made.with_suffix(".new")
            source = ROOT / "tests/native/fake_cuda/fake_cuda.cc"
            command = [compiler, "-std=c++20", "-O2", "-shared", "-fPIC", f"-I{ROOT / 'csrc'}"]
            command += [str(source)]
            subprocess.run([*command, "-o", str(fresh), "-pthread"], check=True, timeout=300)
            fresh.replace(made)
    return made


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Forks processes from a parent with torch imported."""
    made = Forks(TORCH)
    yield made
    made.close()


@pytest.fixture(scope="session")
def vllm_forks() -> Iterator[Forks]:
    """Forks processes from a parent with vLLM's dependencies imported, but not vLLM itself."""
    with tempfile.TemporaryDirectory(prefix="r2serve-forks-") as folder:
        made = Forks(BESIDE_VLLM, Path(folder) / "socket")
        yield made
        made.close()


@pytest.fixture
def forked_vllm(vllm_forks: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `vllm serve`, started by r2serve during the test, a fork of `vllm_forks`."""
    for name, value in vllm_forks.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def cuda_driver(request: pytest.FixtureRequest) -> str:
    """Returns the CUDA library: the real driver on a machine with a GPU, else the fake driver."""
    import torch

    if torch.cuda.is_available():
        return "libcuda.so.1"
    if os.environ.get("R2SERVE_TEST_ON_GPU") == "1":
        pytest.fail("torch.cuda.is_available() is False on a machine with a GPU")
    return str(request.getfixturevalue("fake_cuda"))


def skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Returns the text given to `pytest.skip`, without file and line."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return str(report.longrepr)


def skip_line(reasons: Counter[str]) -> str:
    line = f"skipped: {reasons.total()}"
    if reasons:
        line += " (" + ", ".join(f"{text}: {n}" for text, n in reasons.most_common()) + ")"
    return line


# This summary runs last, so that only pytest's own closing line comes after it.
@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons = Counter(skip_reason(report) for report in terminalreporter.stats.get("skipped", []))
    terminalreporter.write_line(skip_line(reasons))
