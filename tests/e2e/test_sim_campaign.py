"""The simulator's campaign and planted bugs, with a number of seeds suited to a test run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

R2SERVE = Path(sys.executable).with_name("r2serve")

# Seeds that have caught the planted bugs: `r2serve sim --mutants --json FILE` writes the file. An
# outdated seed costs time only: the search then runs from seed 0.
LIKELY = Path(__file__).with_name("mutant_seeds.json")

# Low priority takes long on a busy machine.
pytestmark = [pytest.mark.computes, pytest.mark.timeout(3600)]


def sim(*arguments: str) -> str:
    done = subprocess.run(
        [str(R2SERVE), "sim", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_seeds_break_no_invariant(show: Callable[[str], None]) -> None:
    output = sim("--seeds", "1500")
    show(output.splitlines()[-1])


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("--likely", str(LIKELY)), id="seeds known"),
        pytest.param((), id="seeds searched", marks=pytest.mark.long),
    ],
)
def test_every_planted_bug_is_caught_by_an_invariant(
    arguments: tuple[str, ...], show: Callable[[str], None]
) -> None:
    output = sim("--mutants", *arguments)
    last = output.splitlines()[-1]
    caught, planted = (int(number) for number in last.removeprefix("caught ").split("/"))
    assert caught == planted
    assert planted >= 16
    show(last)


@pytest.mark.long
def test_a_hundred_thousand_seeds_break_no_invariant(show: Callable[[str], None]) -> None:
    output = sim("--seeds", "100000")
    show(output.splitlines()[-1])
