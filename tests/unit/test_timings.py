"""`make test`: the time of each part, and the exit status if a part fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
import run
import timings


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "build" / "timings.json"
    monkeypatch.setattr(timings, "FILE", file)
    return file


def test_a_part_is_kept_with_its_time_and_status(kept: Path) -> None:
    program = "import sys, time; time.sleep(0.3); sys.exit(3)"
    assert timings.main(["run", "build", sys.executable, "-c", program]) == 3
    row = json.loads(kept.read_text())["build"]
    assert 0.3 <= row["seconds"] < 30
    assert time.time() - row["ended"] < 30


def test_the_table_has_only_the_parts_of_this_run(
    kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timings.keep("vLLM", 400.0)
    rows = json.loads(kept.read_text())
    rows["vLLM"]["ended"] -= 1000
    kept.write_text(json.dumps(rows))
    timings.keep("build", 60.0)
    timings.keep("Python tests", 90.0, {"unit": 100.0, "e2e": 70.0})
    assert timings.main(["show", str(time.time() - 500)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines[1:-1]] == ["build", "tests", "e2e", "unit"]
    assert re.match(r" {6}150 s  in all, 5\d\d s since the start", lines[-1])


@pytest.mark.parametrize("arguments", [[], ["run"], ["run", "build"], ["show"], ["shout", "1"]])
def test_wrong_arguments_are_refused(
    arguments: list[str], kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert timings.main(arguments) == 2
    assert "run PART COMMAND" in capsys.readouterr().err
    assert not kept.exists()


NONE = run.NOTHING_COLLECTED


class Pytests:
    """Stands for subprocess: runs of pytest end at once with the given statuses."""

    def __init__(self, statuses: Sequence[int]) -> None:
        self._left = iter(statuses)
        self.commands: list[list[str]] = []
        self.priorities: list[tuple[int, ...]] = []

    def run(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        return subprocess.CompletedProcess(command, next(self._left))

    @contextmanager
    def background(self, command: list[str], stdout: BinaryIO) -> Iterator[SimpleNamespace]:
        self.commands.append(command)
        process = SimpleNamespace(pid=7, returncode=next(self._left), terminate=lambda: None)
        stdout.write(b"the output of a part beside\n")
        yield process

    def choices(self) -> list[str]:
        """Returns the choice of tests by markers for each run."""
        return [command[command.index("-m", 3) + 1] for command in self.commands]


@pytest.fixture
def pytests(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[int]], Pytests]:
    def make(statuses: Sequence[int]) -> Pytests:
        made = Pytests(statuses)
        monkeypatch.setattr(subprocess, "run", made.run)
        monkeypatch.setattr(subprocess, "Popen", made.background)
        monkeypatch.setattr(os, "setpriority", lambda *given: made.priorities.append(given))
        return made

    return make


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ((0, 0, 0, 0), 0),
        ((1, 0, 0, 0), 1),
        ((0, 1, 0, 0), 1),
        ((0, 0, 1, 0), 1),
        ((0, 0, 0, 1), 1),
        ((0, NONE, NONE, NONE), 0),
        ((NONE, NONE, NONE, 0), 0),
        ((NONE, NONE, NONE, 1), 1),
        ((NONE, NONE, NONE, NONE), NONE),
        ((0, -9, 0, 0), -9),
    ],
)
def test_every_part_runs_and_each_fails_the_run(
    statuses: tuple[int, ...],
    expected: int,
    pytests: Callable[[Sequence[int]], Pytests],
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = pytests(statuses)
    assert run.main(["--native-results=there", "-k", "rails"]) == expected
    with_native = ["--native-results=there" in command for command in made.commands]
    assert with_native == [False, False, False, True]
    assert made.priorities == [(os.PRIO_PROCESS, 7, run.NICE)]
    assert all(command[command.index("-k") + 1] == "rails" for command in made.commands)
    assert "== Python tests that compute\nthe output of a part beside" in capsys.readouterr().out


@pytest.mark.parametrize("marker", ["", "alone", "guest", "computes"])
def test_each_test_belongs_to_one_part(
    marker: str, pytests: Callable[[Sequence[int]], Pytests]
) -> None:
    made = pytests((0, 0, 0, 0))
    run.main([])
    marks = {name: name == marker for name in ("alone", "guest", "computes", "long")}
    assert [eval(choice, {}, marks) for choice in made.choices()].count(True) == 1
    assert not any(eval(choice, {}, marks | {"long": True}) for choice in made.choices())
