"""A matrix that continues after a stop, and the options behind --full."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from r2serve.bench.cli import command
from r2serve.bench.collectives import machine, resume
from r2serve.bench.collectives.cli import DEFAULTS, FULL, choose
from r2serve.bench.collectives.matrix import (
    ALGORITHMS,
    OPS,
    STATES,
    MatrixOptions,
    OptionError,
    Setting,
)
from r2serve.bench.collectives.report import CollectivesReport
from r2serve.bench.collectives.runner import Progress, Results, Skipped
from r2serve.bench.collectives.statistics import LatencyRow

OPTIONS = MatrixOptions(sizes=(1024,), ranks=(2, 3), states=("healthy", "one-lost"))


def played(monkeypatch: pytest.MonkeyPatch, stop_at: Setting | None = None) -> list[Setting]:
    """Replaces the measurement of every setting by a row; returns the settings requested."""
    asked: list[Setting] = []

    def measure(_: MatrixOptions, setting: Setting, results: Results, progress: Progress) -> None:
        if setting == stop_at:
            raise KeyboardInterrupt
        asked.append(setting)
        where = (setting.ranks, setting.rails, "r2ccl", "auto", setting.state)
        results.rows.append(
            LatencyRow("all_reduce", 1024, "float32", *where, 5, 6, 7, 5, 1.6, 10, 2.5)
        )
        results.skipped.append(Skipped(f"floor ({setting.where})", "two ranks only"))

    monkeypatch.setattr("r2serve.bench.collectives.runner.measure", measure)
    return asked


def report() -> CollectivesReport:
    return CollectivesReport(machine.describe(["bench", "collectives"]))


def test_a_stopped_run_continues_with_the_missing_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.json"
    settings = list(OPTIONS.settings())
    first = played(monkeypatch, stop_at=settings[2])
    with pytest.raises(KeyboardInterrupt):
        resume.measure(OPTIONS, report(), [], lambda line: None, path)
    assert first == settings[:2]

    again, going_on = played(monkeypatch), report()
    done = resume.resume(path, OPTIONS, going_on, lambda line: None)
    assert done == settings[:2]
    resume.measure(OPTIONS, going_on, done, lambda line: None, path)
    assert again == settings[2:]
    assert [(row.ranks, row.state) for row in going_on.rows] == [
        (one.ranks, one.state) for one in settings
    ]
    assert len(going_on.skipped) == 4
    written = json.loads(path.read_text())
    assert written["rows"][3]["cpu_ns_per_byte"] == 2.5
    assert len(written["matrix"]["done"]) == 4


def test_settings_beyond_the_time_limit_are_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch)
    late = report()
    resume.measure(OPTIONS, late, [], lambda line: None, minutes=1e-9)
    assert late.rows == []
    assert late.pending[1] == "2 ranks, 2 rails, one-lost"


def test_resume_without_a_file_starts_from_the_beginning(tmp_path: Path) -> None:
    assert resume.resume(tmp_path / "rows.json", OPTIONS, report(), lambda line: None) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"matrix": {}}, "no matrix to continue"),
        ({"rows": [{"op": "all_reduce"}]}, "no matrix to continue"),
    ],
)
def test_a_file_of_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object], reason: str
) -> None:
    played(monkeypatch)
    path = tmp_path / "rows.json"
    resume.measure(OPTIONS, report(), [], lambda line: None, path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(OptionError, match=reason):
        resume.resume(path, OPTIONS, report(), lambda line: None)


def test_results_of_another_commit_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played(monkeypatch)
    path, lines, again = tmp_path / "rows.json", list[str](), report()
    resume.measure(OPTIONS, report(), [], lambda line: None, path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "commit": "0123456789ab"}))
    assert resume.resume(path, OPTIONS, again, lines.append) == []
    assert again.rows == []
    assert "is of another commit, 0123456789ab" in lines[0]
    path.write_text('{"commit": "0123456789ab", "form": "an older one"}')
    assert resume.resume(path, OPTIONS, again, lines.append) == []


def test_other_options_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch)
    path = tmp_path / "rows.json"
    resume.measure(OPTIONS, report(), [], lambda line: None, path)
    with pytest.raises(OptionError, match="sizes"):
        resume.resume(path, MatrixOptions(sizes=(4096,), ranks=(2, 3)), report(), lambda line: None)


def test_full_is_the_whole_matrix_unless_options_limit_it() -> None:
    options = choose(FULL, {})
    assert options.ops == OPS
    assert options.ranks == (2, 3, 4, 5, 6, 7, 8)
    assert options.states == tuple(STATES)
    assert options.algorithms == ALGORITHMS
    assert choose(FULL, {"ranks": ("2", "4"), "seconds": 0.5}).ranks == (2, 4)
    plain = choose(DEFAULTS, {"ops": (), "sizes": None})
    assert (plain.ops, plain.ranks, plain.states) == (("all_reduce",), (2,), ("healthy",))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--resume"], "--resume needs --json"),
        (["--state", "two-lost"], "--state two-lost needs at least 3 rails"),
        (["--ranks", "many"], "--ranks has 'many'"),
        (["--op", "scan"], "--op has 'scan'"),
    ],
)
def test_wrong_options_end_before_anything_is_measured(arguments: list[str], reason: str) -> None:
    result = CliRunner().invoke(command, ["collectives", *arguments])
    assert result.exit_code == 2
    assert reason in result.output
