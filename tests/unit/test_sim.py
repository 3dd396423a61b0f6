"""The simulator's command line; a campaign without activity must fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from r2serve import _core
from r2serve.cli import main
from r2serve.sim import campaign, mutants


def result(seed: int, **changes: Any) -> dict[str, Any]:
    """Returns the result of a seed with every fault and mechanism."""
    counted = dict.fromkeys(campaign.SUMMED, 1)
    faults = dict.fromkeys(_core.fault_kinds(), 1)
    return {"seed": seed, "job": "a job", "violations": [], "faults": faults, **counted, **changes}


def totals(count: int, **changes: Any) -> campaign.Totals:
    sum_of = campaign.Totals()
    for seed in range(count):
        sum_of.add(result(seed, **changes))
    return sum_of


@pytest.mark.slow
def test_a_campaign_passes_and_counts(tmp_path: Path) -> None:
    file = tmp_path / "sim.json"
    done = CliRunner().invoke(main, ["sim", "--seeds", "120", "--json", str(file)])
    assert done.exit_code == 0, done.output
    written = json.loads(file.read_text())
    assert written["seeds"] == 120
    assert written["failures"] == []
    assert set(written["faults"]) == set(_core.fault_kinds())
    last = done.output.splitlines()[-1]
    for name in ("seeds 120", "steps", "faults", "replays", "hedges", "fences"):
        assert name in last


def test_a_seed_can_be_traced_and_is_reproducible() -> None:
    first, second = (CliRunner().invoke(main, ["sim", "--seed", "31", "--trace"]) for _ in range(2))
    assert first.exit_code == 0
    assert "FAULT" in first.output
    assert first.output == second.output


@pytest.mark.parametrize("name", campaign.MECHANISMS)
def test_a_campaign_with_an_idle_mechanism_fails(name: str) -> None:
    assert totals(campaign.CAMPAIGN_SEEDS).idle() == []
    assert totals(campaign.CAMPAIGN_SEEDS, **{name: 0}).idle() == [name]
    assert totals(campaign.CAMPAIGN_SEEDS - 1, **{name: 0}).idle() == []


def test_a_campaign_without_one_kind_of_fault_fails() -> None:
    faults = dict.fromkeys(_core.fault_kinds(), 1) | {"half_open": 0}
    assert totals(campaign.CAMPAIGN_SEEDS, faults=faults).idle() == ["half_open"]


def test_a_failed_seed_prints_its_replay_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(first: int, count: int, jobs: int | None) -> list[dict[str, Any]]:
        return [
            result(seed, violations=["I1: wrong bytes"]) for seed in range(first, first + count)
        ]

    monkeypatch.setattr(campaign, "run", broken)
    done = CliRunner().invoke(main, ["sim", "--seed", "7", "--seeds", "20"])
    assert done.exit_code == 1
    assert "I1: wrong bytes" in done.output
    assert "replay: r2serve sim --seed 7 --trace" in done.output
    assert "and 10 more seeds failed" in done.output


def test_this_build_has_no_planted_bugs() -> None:
    assert _core.mutants() == []
    with pytest.raises(ValueError, match="no mutants"):
        _core.simulate(0, mutant="reuse_without_fence")


def test_mutants_need_the_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mutants, "SOURCES", tmp_path)
    done = CliRunner().invoke(main, ["sim", "--mutants"])
    assert done.exit_code == 1
    assert "source tree" in done.output


@pytest.mark.parametrize("text", ["", "{}", '[{"name": "a"}]', '[{"name": "a", "seed": "soon"}]'])
def test_a_wrong_file_of_likely_seeds_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "seeds.json"
    file.write_text(text)
    done = CliRunner().invoke(main, ["sim", "--mutants", "--likely", str(file)])
    assert done.exit_code == 2
    assert "must be a file written by --mutants --json" in done.output


def test_likely_seeds_come_first_and_the_search_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    class Core:
        @staticmethod
        def mutants() -> list[str]:
            return ["known", "outdated", "new"]

    tried = []

    def judge(_: Path, mutant: str, first: int, count: int) -> mutants.MutantResult:
        tried.append((mutant, first, count))
        return mutants.MutantResult(mutant, mutant != "outdated" or count > 1, first, "")

    monkeypatch.setattr(mutants, "load", lambda _: Core)
    monkeypatch.setattr(mutants, "judge", judge)
    results = list(mutants.judge_all(Path(), 0, 9, {"known": 5, "outdated": 6, "gone": 7}))
    assert [each.name for each in results if each.caught] == ["known", "outdated", "new"]
    assert tried == [("known", 5, 1), ("outdated", 6, 1), ("outdated", 0, 9), ("new", 0, 9)]
