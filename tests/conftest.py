"""The report at the end of a test run: skipped tests with reasons, native tests included."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath

import pytest
import timings
from forked import BESIDE_VLLM, TORCH, Forks

ROOT = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--native-results",
        metavar="FOLDER",
        help="GoogleTest XML reports, a folder for each build variant, for the closing report",
    )
    parser.addoption("--timings", metavar="PART", help="save the duration of this run as PART")


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


class Report:
    """Reports the lines of `show` and the time of each group of tests.

    Workers of pytest-xdist send their reports to the main process. Only the main process has a
    Report.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._plugins = config.pluginmanager
        self._part: str | None = config.getoption("--timings")
        self._began = time.monotonic()
        self._busy: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._busy[group_of(report.nodeid)] += report.duration
        terminal = self._plugins.get_plugin("terminalreporter")
        if report.when == "teardown" and terminal is not None:
            for name, line in report.user_properties:
                if name == "shown":
                    terminal.write_line(f"\n    {line}")

    def pytest_sessionfinish(self) -> None:
        if self._part is not None:
            timings.keep(self._part, time.monotonic() - self._began, dict(self._busy))


def group_of(nodeid: str) -> str:
    """Returns the folder of a test, or the name of a slow group (guest, model, sim)."""
    path = PurePath(nodeid.partition("::")[0])
    for group in ("guest", "model", "sim"):
        if path.stem.startswith(f"test_{group}"):
            return group
    return path.parts[1] if len(path.parts) > 2 else path.stem


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Report(config))


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


def native_results(folder: Path) -> tuple[int, Counter[str]]:
    """Returns passed tests, and skipped tests by reason, from GoogleTest reports in `folder`."""
    passed, skipped = 0, Counter[str]()
    for report in sorted(folder.glob("*.xml")):
        for case in ElementTree.parse(report).iter("testcase"):
            if case.get("result") == "skipped":
                note = case.find("skipped")
                text = (note.get("message") if note is not None else None) or "no reason given"
                skipped[text.strip().splitlines()[-1]] += 1
            elif case.get("status") == "run" and case.find("failure") is None:
                passed += 1
    return passed, skipped


def skip_reason(report: pytest.TestReport) -> str:
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
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    reasons = Counter(skip_reason(report) for report in terminalreporter.stats.get("skipped", []))
    folder = config.getoption("--native-results")
    if folder is not None:
        for variant in sorted(path for path in Path(folder).iterdir() if path.is_dir()):
            passed, skipped = native_results(variant)
            terminalreporter.write_line(f"native, {variant.name}: {passed} passed")
            reasons += skipped
    terminalreporter.write_line(skip_line(reasons))
