"""The closing report counts skips with their reasons."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow

PYTHON_TESTS = """
import pytest
def test_runs(): assert True
@pytest.mark.skip(reason="needs root")
def test_marked(): pass
def test_calls(): pytest.skip("needs root")
def test_other(): pytest.skip("no second NIC")
"""

SHOWING_TESTS = """
def test_shows(show): show("7 rails lost")
def test_shows_too(show): show("9 rails lost")
"""


def run(folder: Path, *arguments: str, tests: str = PYTHON_TESTS) -> list[str]:
    (folder / "test_example.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *arguments, "test_example.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(TESTS), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_reasons_are_counted_and_pytests_summary_comes_last(tmp_path: Path) -> None:
    lines = run(tmp_path)
    assert lines[-2] == "skipped: 3 (needs root: 2, no second NIC: 1)"
    assert "1 passed, 3 skipped" in lines[-1]


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["one process", "a worker"])
def test_lines_of_show_appear_in_the_output(tmp_path: Path, workers: tuple[str, ...]) -> None:
    if workers and importlib.util.find_spec("xdist") is None:
        pytest.skip("pytest-xdist is not installed")
    lines = run(tmp_path, *workers, tests=SHOWING_TESTS)
    assert sorted(line for line in lines if "lost" in line) == [
        "    7 rails lost",
        "    9 rails lost",
    ]
