"""Closing report of a test run: what was skipped and why, native tests included; and `show`."""

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
from forked import BESIDE_VLLM, Forks

ROOT = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--native-results",
        metavar="FOLDER",
        help="GoogleTest's XML reports, one folder a build variant, to count in the closing report",
    )
    parser.addoption("--timings", metavar="PART", help="keep the time of this run as that of PART")


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """What a plugin tells its workers by variables is not told to the tests that follow."""
    before = dict(os.environ)
    yield
    now = set(os.environ) - {"PYTEST_CURRENT_TEST"}  # pytest's own
    for name in now - set(before):
        del os.environ[name]
    for name, value in before.items():
        if name != "PYTEST_CURRENT_TEST" and os.environ.get(name) != value:
            os.environ[name] = value


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What r2serve has logged; vLLM and torch log what they like, and when depends on the order."""
    return lambda: [
        each.getMessage() for each in caplog.records if each.name.partition(".")[0] == "r2serve"
    ]


@pytest.fixture
def show(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Prints a line, when the test ends, that is to be seen in every run, also if it passes."""

    def say(line: str) -> None:
        request.node.user_properties.append(("shown", line))

    return say


class Report:
    """What this run tells beyond pytest's own report: lines of `show`, and where its time went.

    Workers of pytest-xdist report to the process that started them, which alone has one of these.
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
    """The folder of a test, or what it tests where that takes minutes."""
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
    """A CUDA driver that needs no GPU, as a library that is loaded in the place of the real one."""
    from r2serve import _core

    if not _core.has_kernels():
        pytest.skip("no nvcc when r2serve was installed")
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers of this run: one compiles it for all
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
def vllm_forks() -> Iterator[Forks]:
    """Forks of a process that has imported what vLLM does, and vLLM itself not."""
    with tempfile.TemporaryDirectory(prefix="r2serve-forks-") as folder:
        made = Forks(BESIDE_VLLM, Path(folder) / "socket")
        yield made
        made.close()


@pytest.fixture
def forked_vllm(vllm_forks: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each `vllm serve` that r2serve starts meanwhile is one of vllm_forks."""
    for name, value in vllm_forks.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def cuda_driver(request: pytest.FixtureRequest) -> str:
    """The driver of this machine's GPU, or one that needs none."""
    import torch

    if torch.cuda.is_available():
        return "libcuda.so.1"
    if os.environ.get("R2SERVE_TEST_ON_GPU") == "1":
        pytest.fail("torch.cuda.is_available() is False on a machine with a GPU")
    return str(request.getfixturevalue("fake_cuda"))


def native_results(folder: Path) -> tuple[int, Counter[str]]:
    """Passed tests, and skipped ones by reason, in GoogleTest reports below ``folder``."""
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
    """The text given to ``pytest.skip``, without file and line."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return str(report.longrepr)


def skip_line(reasons: Counter[str]) -> str:
    line = f"skipped: {reasons.total()}"
    if reasons:
        line += " (" + ", ".join(f"{text}: {n}" for text, n in reasons.most_common()) + ")"
    return line


# Last of all summaries, so that only pytest's own closing line comes after it.
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
