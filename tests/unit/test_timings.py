"""`make test`: the time of each part, and the exit status if a part fails."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ((0, 0), 0),
        ((1, 0), 1),
        ((0, 1), 1),
        ((0, run.NOTHING_COLLECTED), 0),
        ((run.NOTHING_COLLECTED, 0), 0),
        ((run.NOTHING_COLLECTED, 1), 1),
        ((run.NOTHING_COLLECTED, run.NOTHING_COLLECTED), run.NOTHING_COLLECTED),
        ((-9, 0), -9),
    ],
)
def test_both_parts_run_and_either_fails_the_run(
    statuses: tuple[int, int], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    left: Iterator[int] = iter(statuses)

    def ran(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, next(left))

    monkeypatch.setattr(subprocess, "run", ran)
    assert run.main(["--native-results=there", "-k", "rails"]) == expected
    assert ["--native-results=there" in command for command in commands] == [False, True]
    chosen = [command[command.index("-m", 3) + 1] for command in commands]
    assert chosen == ["not long and not alone", "alone and not long"]
    assert all(command[-2:] == ["-k", "rails"] for command in commands)
