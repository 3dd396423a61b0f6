"""Compares ratios with committed ratios; tests/e2e/test_baseline.py does the measuring."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from r2serve.bench.cli import command
from r2serve.bench.collectives import baseline, machine
from r2serve.bench.collectives.baseline import BaselineError, Effort, PairedRatio, Point, complaints
from r2serve.bench.collectives.control import WorkerError
from r2serve.bench.collectives.runner import Progress

POINT = Point(4096, "r2ccl", "floor")
OTHER = Point(65536, "r2ccl", "r2ccl-off")


def ratio(value: float) -> PairedRatio:
    return PairedRatio(value, value * 0.98, value * 1.03, 60)


@pytest.mark.parametrize("now", [1.4, 1.4 * 1.149, 1.4 * 0.851])
def test_ratios_within_the_limits_give_no_complaint(now: float) -> None:
    assert complaints({POINT: ratio(now)}, {POINT: ratio(1.4)}) == []


def test_slower_names_the_point_the_ratios_and_the_limit() -> None:
    (said,) = complaints({POINT: ratio(1.62)}, {POINT: ratio(1.4)})
    assert said == (
        "4 KiB: r2ccl / floor: 1.620 where the baseline has 1.400, slower than the limit of 1.610"
    )


def test_faster_asks_for_another_baseline() -> None:
    (said,) = complaints({POINT: ratio(1.18)}, {POINT: ratio(1.4)})
    assert "faster than the limit of 1.190" in said
    assert "--write" in said


def test_each_point_is_judged_and_a_point_missing_in_the_baseline_is_wrong() -> None:
    found = complaints({POINT: ratio(9), OTHER: ratio(1.0)}, {POINT: ratio(1.4)})
    assert [said.split(": ")[0] for said in found] == ["4 KiB", "64 KiB"]
    assert "has no such point" in found[1]


def test_the_median_over_pairs_counts_and_no_pairs_are_an_error() -> None:
    assert baseline.summarise([1.0, 5.0, 1.1, 1.2]) == PairedRatio(1.1, 1.1, 5.0, 4)
    with pytest.raises(BaselineError, match="not measured"):
        baseline.summarise([])


def about(cpu: str, commit: str = "abc") -> dict[str, Any]:
    return {"commit": commit, "machine": {"cpu": cpu, "cores": 2}}


def test_a_written_baseline_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "baseline.jsonl"
    rows = {POINT: PairedRatio(1.23456, 1.2, 1.3, 60), OTHER: ratio(1.0)}
    baseline.write(file, rows, about("x"))
    assert baseline.read(file, "x") == {POINT: PairedRatio(1.235, 1.2, 1.3, 60), OTHER: ratio(1.0)}
    assert [json.loads(line)["commit"] for line in file.read_text().splitlines()] == ["abc", "abc"]


def test_each_processor_has_a_separate_baseline(tmp_path: Path) -> None:
    file = tmp_path / "baseline.jsonl"
    baseline.write(file, {POINT: ratio(1.4), OTHER: ratio(1.0)}, about("x"))
    baseline.write(file, {POINT: ratio(1.6)}, about("y"))
    baseline.write(file, {POINT: ratio(1.2)}, about("x", "newer"))
    ratios = {
        cpu: {str(point): of.ratio for point, of in baseline.read(file, cpu).items()}
        for cpu in ("x", "y")
    }
    assert ratios == {"x": {str(POINT): 1.2}, "y": {str(POINT): 1.6}}
    with pytest.raises(BaselineError, match=r"this processor \(z\), only of y, x: .*--write"):
        baseline.read(file, "z")


ROW = (
    '{"bytes": 4096, "over": "r2ccl", "under": "floor", '
    '"ratio": %s, "low": 1, "high": 1, "pairs": 9, "machine": {"cpu": "x"}}'
)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no points of this processor"),
        ("no json", "JSONDecodeError"),
        ('{"bytes": 4096}', "KeyError"),
        (ROW % "0", "the ratio 0"),
        (ROW % "NaN", "the ratio nan"),
        (f"{ROW % '1'}\n{ROW % '1'}", "twice"),
        ("7", "TypeError"),
        ((ROW % "1").replace("machine", "place"), "KeyError: 'machine'"),
    ],
)
def test_a_file_that_is_no_baseline_is_refused(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "baseline.jsonl"
    file.write_text(text)
    with pytest.raises(BaselineError, match=why):
        baseline.read(file, "x")
    with pytest.raises(BaselineError, match="FileNotFoundError"):
        baseline.read(tmp_path / "other", "x")


def test_the_committed_baselines_have_every_point() -> None:
    rows = map(json.loads, baseline.COMMITTED.read_text().splitlines())
    for cpu in {row["machine"]["cpu"] for row in rows}:
        assert set(baseline.read(baseline.COMMITTED, cpu)) == set(baseline.POINTS)


def run(
    monkeypatch: pytest.MonkeyPatch, values: Mapping[Point, float] | Exception, *arguments: str
) -> tuple[int, str]:
    def measured(effort: Effort, progress: Progress) -> dict[Point, PairedRatio]:
        if isinstance(values, Exception):
            raise values
        return {point: ratio(values[point]) for point in effort.points if point in values}

    monkeypatch.setattr(baseline, "measure", measured)
    done = CliRunner().invoke(command, ["baseline", *arguments])
    return done.exit_code, done.output


def test_the_command_fails_if_a_ratio_leaves_the_limits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = str(tmp_path / "baseline.jsonl")
    assert run(monkeypatch, {POINT: 1.4}, "--write", file)[0] == 0
    assert run(monkeypatch, {POINT: 1.5}, "--check", file)[0] == 0
    code, said = run(monkeypatch, {POINT: 2.0}, "--check", file)
    assert code == 1
    assert "4 KiB: r2ccl / floor: 2.000 where the baseline has 1.400" in said


def test_a_failed_measurement_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "baseline.jsonl"
    baseline.write(file, {POINT: ratio(1.4)}, about(machine.cpu_model()))
    code, said = run(monkeypatch, WorkerError("floor died"), "--check", str(file))
    assert (code, "floor died" in said) == (1, True)
    code, said = run(monkeypatch, {}, "--check", str(tmp_path / "none"))
    assert (code, "FileNotFoundError" in said) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "either --check or --write"),
        (["--check", "a", "--write", "b"], "either --check or --write"),
        (["--write", "a", "--sizes", "4KiB,3KiB"], "no point has"),
        (["--write", "a", "--sizes", "x"], "--sizes has 'x'"),
    ],
)
def test_arguments_that_make_no_sense(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], why: str
) -> None:
    code, said = run(monkeypatch, {}, *arguments)
    assert code == 2
    assert why in said
