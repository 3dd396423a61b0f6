"""`r2serve bench serve`: a run whose requests end before its last fault is no result."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

pytest.importorskip("aiohttp")

from r2serve.bench.serve import runner, scenarios
from r2serve.bench.serve.cli import command
from r2serve.bench.serve.contenders import CONTENDERS
from r2serve.bench.serve.store import Rows
from r2serve.bench.serve.strike import MissedFaultsError, check_made
from r2serve.bench.serve.workload import arrange
from r2serve.lab.player import Played
from r2serve.lab.serving.client import Request, Run
from r2serve.lab.serving.progress import Progress

FAULTS = scenarios.scenario("twenty-faults")
EARLY_S, WHOLE_S = 20.0, 61.0
"""Last token after six faults, and after all faults."""
ABOUT = {"commit": "c1", "date": "today", "command": "r2serve bench serve", "machine": {}}


def run_of(last_s: float, error: str = "") -> Run:
    times = (1_000_000_000, int(last_s * 1e9))
    return Run((Request((1, 2), times, error, finished=not error, sent_ns=1),))


def played_until(last_s: float) -> list[Played]:
    made = [fault for fault in FAULTS if fault.at_s < last_s]
    return [Played(fault.kind, fault, (), 0.0, int(fault.at_s * 1e9)) for fault in made]


def test_every_fault_must_strike_before_the_last_token() -> None:
    check_made(FAULTS, played_until(WHOLE_S), run_of(WHOLE_S))
    for played in (played_until(EARLY_S), played_until(WHOLE_S)):
        with pytest.raises(MissedFaultsError, match="6 of 20 faults"):
            check_made(FAULTS, played, run_of(EARLY_S))


def test_a_run_with_a_lost_request_may_end_early() -> None:
    check_made(FAULTS, played_until(EARLY_S), run_of(EARLY_S, error="cut"))


class PlayedPlace:
    """A contender whose requests all end early."""

    contender = CONTENDERS["gloo"]
    label, command, restarts, lab = "gloo", "", 0, None

    def __init__(self) -> None:
        self.runs = self.stops = 0

    def __enter__(self) -> PlayedPlace:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def server(self, _: Sequence[str]) -> object:
        return object()

    def settle(self) -> None:
        return

    def rail_in_use(self) -> int:
        return 0

    def finish(self, *_: object) -> Run:
        self.runs += 1
        return run_of(EARLY_S)

    def stop(self) -> None:
        self.stops += 1


@contextmanager
def six_strikes(*_: object) -> Iterator[SimpleNamespace]:
    yield SimpleNamespace(played=played_until(EARLY_S))


def test_a_run_that_ends_early_is_no_result_and_is_measured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = PlayedPlace()
    for module in (runner.labs, runner.workdir):
        monkeypatch.setattr(module, "sweep", lambda: 0)
    monkeypatch.setattr(runner, "make_tiny_llama", lambda path: path)
    monkeypatch.setattr(runner, "_place", lambda *_: place)
    monkeypatch.setattr(runner, "_start_all", lambda *_: {})
    monkeypatch.setattr(runner, "_worker_gaps", lambda *_: None)
    monkeypatch.setattr(runner, "strikes", six_strikes)
    monkeypatch.setattr(runner._Bench, "_reference", lambda *_: run_of(EARLY_S))
    monkeypatch.setattr(runner._Bench, "_load", lambda *_: SimpleNamespace(begun_ns=1))
    options = runner.RunOptions(
        workload=arrange([("a", 2)], 0, concurrency=1),
        contenders=("gloo",),
        scenarios={"twenty-faults": FAULTS},
    )
    rows = Rows(None, ABOUT)
    for times in (1, 2):
        [row] = runner.run(options, rows, Progress(Console(file=io.StringIO())))
        assert row["not_run"].startswith("6 of 20 faults were made")
        assert row["missed_faults"] == 14
        assert "requests" not in row
        assert place.runs == times
    assert place.stops == 0, "a healthy engine serves the next run"


def test_the_command_fails_after_a_run_that_ends_early(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = {"scenario": "twenty-faults", "contender": "r2ccl", "pair": 0, "key": "k"}
    early: dict[str, Any] = row | {"not_run": "6 of 20 faults were made", "missed_faults": 14}
    monkeypatch.setattr(runner, "run", lambda _options, rows, _progress: [rows.add(early)])
    path = tmp_path / "rows.jsonl"
    result = CliRunner().invoke(command, ["--scenario", "twenty-faults", "--json", str(path)])
    assert result.exit_code == 1
    said = " ".join(result.output.split())
    assert "twenty-faults, r2ccl: not run: 6 of 20 faults were made" in said
    assert "the requests ended too early: twenty-faults, r2ccl" in said
