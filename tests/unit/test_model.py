"""The model of the link protocol: valid and invalid results of searches, and the searches."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def load() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "docs" / "model" / "check.py"
    spec = importlib.util.spec_from_file_location("model_check", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


check = load()
PROTOCOL = check.RUNS[0]
NO_REUSE_RULE = next(run for run in check.RUNS if run.name == "NO_REUSE_RULE")

# The output format of Spin 6.5.2.
COMPLETE = """
(Spin Version 6.5.2 -- 6 December 2019)
	+ Compression

Full statespace search for:
	never claim         	- (none specified)
	assertion violations	+
	cycle checks       	- (disabled by -DSAFETY)
	invalid end states	+

State-vector 156 byte, depth reached 56, errors: 0
 15434124 states, stored
 24079871 states, matched
1.0951400e+08 transitions (= stored+matched)
       30 atomic steps
hash conflicts:   1251541 (resolved)

Stats on memory usage (in Megabytes):
  256.000	memory used for hash table (-w25)
    0.534	memory used for DFS stack (-m10000)
  600.219	total actual memory usage

unreached in proctype Sender
	link.pml:214, state 82, "-end-"
	(1 of 82 states)
unreached in proctype Reader
	(0 of 22 states)
unreached in init
	(0 of 17 states)

pan: elapsed time 14.2 seconds
pan: rate 382684.79 states/second
"""
VIOLATED = (
    "pan:1: assertion violated  !(stale_write) (at depth 22)\n"
    "pan: wrote link.pml.trail\n"
    "Warning: Search not completed\n"
) + COMPLETE.replace("errors: 0", "errors: 1")
REPLAY = """ 22:	proc  1 (Sender) link.pml:202 (state 79)	[D_STEP202]
S: message 2 on rail 0
 23:	proc  3 (Receiver) link.pml:289 (state 58)	[D_STEP289]
rail 1 writes message 0
pan:1: assertion violated  !(stale_write) (at depth 23)
spin: trail ends after 23 steps
#processes 11:
 23:	proc 0 (:init:)  link.pml:330 (state 17)
"""


def flaws(run: Any, output: str, replay: str = "") -> list[str]:
    found: list[str] = check.flaws(run, check.parse(output), check.steps_of(replay))
    return found


def test_a_complete_search_without_errors_passes() -> None:
    outcome = check.parse(COMPLETE)
    assert (outcome.states, outcome.depth, outcome.memory_mb) == (15434124, 56, 600.219)
    assert outcome.seconds == 14.2
    assert flaws(PROTOCOL, COMPLETE) == []


@pytest.mark.parametrize(
    "output",
    [
        "error: max search depth too small\n" + COMPLETE,
        "pan: reached -DMEMLIM bound\n" + COMPLETE,
        "pan: out of memory\n" + COMPLETE,
        COMPLETE.replace("+ Compression", "Warning: Search not completed\n	+ Compression"),
        COMPLETE.replace("Full statespace search", "Bit statespace search"),
        COMPLETE.replace("	+ Compression", "	+ Hash Compact"),
        COMPLETE.split("State-vector")[0],
        COMPLETE.split("pan: elapsed")[0],
        "",
    ],
    ids=["depth", "limit", "memory", "stopped", "bits", "hashes", "killed", "no end", "nothing"],
)
def test_a_search_that_was_cut_short_does_not_pass(output: str) -> None:
    assert any("not exhaustive" in flaw for flaw in flaws(PROTOCOL, output))


def test_an_error_or_an_unreached_step_does_not_pass() -> None:
    assert flaws(PROTOCOL, VIOLATED) != []
    assert flaws(PROTOCOL, COMPLETE.replace("errors: 0", "errors: 1")) != []
    for line in ('	link.pml:209, state 61, "D_STEP209"', '	link.pml:312, state 22, "-end-"'):
        output = COMPLETE.replace("	(0 of 22 states)", f"{line}\n	(1 of 22 states)")
        (flaw,) = flaws(PROTOCOL, output)
        assert "no run takes this step: Reader" in flaw


def test_a_broken_variant_must_end_in_its_own_assertion() -> None:
    assert flaws(NO_REUSE_RULE, VIOLATED, REPLAY) == []
    assert flaws(NO_REUSE_RULE, COMPLETE) != []
    assert flaws(NO_REUSE_RULE, VIOLATED) != []  # there is no counterexample to replay
    assert flaws(NO_REUSE_RULE, VIOLATED.replace("stale_write", "early_write"), REPLAY) != []
    assert flaws(NO_REUSE_RULE, VIOLATED, REPLAY.replace("stale_write", "early_write")) != []
    assert flaws(NO_REUSE_RULE, VIOLATED, REPLAY.replace("writes", "misses")) != []


@pytest.fixture(scope="module")
def spin() -> None:
    for tool in ("spin", "gcc"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")


@pytest.mark.usefixtures("spin")
@pytest.mark.long
def test_a_real_search_cut_short_does_not_pass(tmp_path: Path) -> None:
    small = replace(PROTOCOL, defines=("FAULTS=1",))
    outcome, steps = check.search(small, tmp_path)
    assert check.flaws(small, outcome, steps) == []
    outcome, steps = check.search(small, tmp_path, depth=outcome.depth - 5)
    assert outcome.errors == 0
    assert check.flaws(small, outcome, steps) == ["not exhaustive: max search depth too small"]


# All whole models, and two broken variants of each: other variants search the same code.
QUICK_RUNS = (
    *("protocol", "NO_REUSE_RULE", "NUMBER_IGNORED"),
    *("mailbox", "BLOCK_DECIDES_ALONE", "LOSS_NOT_SIGNALLED"),
    *("posted receives", "ROOM_BEFORE_FENCE", "REPLAY_WITHOUT_ROOM"),
)


@pytest.mark.computes
@pytest.mark.usefixtures("spin")
@pytest.mark.timeout(3600)  # low priority takes long on a busy machine
@pytest.mark.parametrize(
    "run",
    [
        pytest.param(run, id=run.name, marks=() if run.name in QUICK_RUNS else pytest.mark.long)
        for run in (*check.RUNS, *check.LONG_RUNS)
    ],
)
def test_the_protocol_holds_and_broken_variants_are_caught(run: Any, tmp_path: Path) -> None:
    outcome, steps = check.search(run, tmp_path)
    assert check.flaws(run, outcome, steps) == []
