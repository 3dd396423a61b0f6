"""`make test`: the time of each part."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest
import timings


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "build" / "timings.json"
    monkeypatch.setattr(timings, "FILE", file)
    return file


def test_a_part_is_kept_with_its_time_and_status(kept: Path) -> None:
    program = "import sys, time; time.sleep(0.3); sys.exit(3)"
    began = time.time()
    begun_s = time.monotonic()
    assert timings.main(["run", "build", sys.executable, "-c", program]) == 3
    took_s = time.monotonic() - begun_s
    row = json.loads(kept.read_text())["build"]
    assert 0.3 <= row["seconds"] <= took_s + 0.1  # rounded to 0.1 s
    assert began <= row["ended"] <= time.time()


def test_the_table_has_only_the_parts_of_this_run(
    kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timings.keep("vLLM", 400.0)
    rows = json.loads(kept.read_text())
    rows["vLLM"]["ended"] -= 1000
    kept.write_text(json.dumps(rows))
    timings.keep("build", 60.0)
    timings.keep("unit", 90.0)
    assert timings.main(["show", str(time.time() - 500)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines[1:-1]] == ["build", "unit"]
    since = re.match(r" +(\d+) s  since the start", lines[-1])
    assert since is not None
    assert int(since[1]) >= 500


@pytest.mark.parametrize("arguments", [[], ["run"], ["run", "build"], ["show"], ["shout", "1"]])
def test_wrong_arguments_are_refused(
    arguments: list[str], kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert timings.main(arguments) == 2
    assert "run PART COMMAND" in capsys.readouterr().err
    assert not kept.exists()
