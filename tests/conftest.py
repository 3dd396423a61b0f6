"""Closing report of a test run: what was skipped and why, native tests included; and `show`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--native-results",
        metavar="FOLDER",
        help="GoogleTest's XML reports, one folder a build variant, to count in the closing report",
    )


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
def show(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Prints a line that is to be seen in every run, also of tests that pass."""

    def say(line: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n    {line}\n")

    return say


@pytest.fixture(scope="session")
def fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CUDA driver that needs no GPU, as a library that is loaded in the place of the real one."""
    from r2serve import _core

    if not _core.has_kernels():
        pytest.skip("no nvcc when r2serve was installed")
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    made = tmp_path_factory.mktemp("cuda") / "libfake_cuda.so"
    source = ROOT / "tests/native/fake_cuda/fake_cuda.cc"
    include = [f"-I{ROOT / folder}" for folder in ("csrc", "csrc/include")]
    command = [compiler, "-std=c++20", "-O2", "-shared", "-fPIC", *include]
    subprocess.run([*command, str(source), "-o", str(made), "-pthread"], check=True, timeout=300)
    return made


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
