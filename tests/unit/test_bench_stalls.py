"""Reads a stall from the times of back-to-back collectives."""

from __future__ import annotations

from typing import Any

import pytest
from soaked import FakeLab, FakeWorkers

from r2serve.bench.collectives import stalls
from r2serve.bench.collectives.stalls import KINDS, analyse, run, summarise
from r2serve.bench.collectives.strikes import (
    SIZES,
    MissedError,
    Soak,
    StrikeError,
    hit_call,
)
from r2serve.lab.holder import LabUnavailableError

MS = 1_000_000


def test_the_hit_call_is_the_longest_of_any_rank_after_the_fault() -> None:
    # Rank 0: 10 calls of 1 ms, a call of 8 ms that begins at 10 ms, then 5 calls of 2 ms.
    rank0 = Soak(0, [MS] * 10 + [8 * MS] + [2 * MS] * 5)
    rank1 = Soak(0, [MS] * 10 + [9 * MS] + [2 * MS] * 5)
    stall, undisturbed, following = analyse([rank0, rank1], struck_ns=12 * MS)
    assert stall == 9 * MS
    assert undisturbed == MS
    assert following == [2 * MS] * 5


def test_a_slow_call_before_the_fault_is_no_stall() -> None:
    soak = Soak(100 * MS, [MS, 50 * MS, MS, 3 * MS, MS])
    stall, undisturbed, following = analyse([soak], struck_ns=153 * MS)
    assert (stall, undisturbed) == (3 * MS, 50 * MS)
    assert following == [MS]


def test_a_call_in_flight_at_the_fault_counts() -> None:
    soak = Soak(0, [MS, 30 * MS, MS])
    assert analyse([soak], struck_ns=2 * MS)[0] == 30 * MS


def test_a_slow_call_long_after_the_fault_is_no_stall() -> None:
    soak = Soak(0, [MS, 4 * MS, *([MS] * 400), 90 * MS, MS])
    stall, _, following = analyse([soak], struck_ns=2 * MS)
    assert stall == 4 * MS
    assert following == [MS] * 100


def test_a_long_stall_counts_in_full() -> None:
    assert analyse([Soak(0, [MS, 5000 * MS, MS])], struck_ns=2 * MS)[0] == 5000 * MS


@pytest.mark.parametrize("struck_ns", [0, 10 * MS])
def test_a_fault_outside_the_collectives_is_no_measurement(struck_ns: int) -> None:
    with pytest.raises(StrikeError, match="did not fall"):
        analyse([Soak(MS, [MS, MS, MS])], struck_ns)


def test_without_calls_after_the_hit_call_there_is_no_measurement() -> None:
    with pytest.raises(StrikeError, match="no collective followed"):
        analyse([Soak(0, [MS, MS, 5 * MS])], struck_ns=2 * MS + 1)


def test_a_fault_after_the_last_call_hits_no_call() -> None:
    assert hit_call([Soak(0, [MS, MS])], struck_ns=3 * MS) is None
    assert hit_call([Soak(0, [MS, 2 * MS]), Soak(0, [MS])], struck_ns=2 * MS) == (2 * MS, 1)


def strike(lab: Any, kind: str) -> stalls.MeasuredFault:
    """Runs a fault at node 1; a window lasts through the undisturbed command and the fault."""
    both: Any = FakeWorkers(lab, stalls.WINDOW_MS, commands=2)
    one: Any = FakeWorkers(FakeLab(), stalls.WINDOW_MS)
    return stalls._strike(lab, both, one, kind, SIZES[0], 1)


@pytest.mark.parametrize(("kind", "word"), [("carrier_loss", "cut"), ("black_hole", "black_hole")])
def test_the_undisturbed_command_comes_first_and_healing_after_the_states(
    kind: str, word: str
) -> None:
    lab = FakeLab()
    fault = strike(lab, kind)
    assert (fault.kind, fault.node, fault.rail) == (kind, 1, 0)
    assert fault.stall_ms > 0
    assert lab.log[-6:] == ["rails", "soak", "heal 1 0", f"{word} 1 0", "rails", "heal 1 0"]
    begun_s, _, undisturbed_s, struck_s, *_ = lab.times_s[-6:]
    assert undisturbed_s - begun_s >= stalls.BEFORE_FAULT_MS / 3000
    assert struck_s - begun_s >= stalls.BEFORE_FAULT_MS / 1e3


def test_an_unnoticed_fault_is_no_measurement_and_healed() -> None:
    lab = FakeLab(works=False)
    with pytest.raises(StrikeError, match="carrier_loss of rail 0 of node 1 was not noticed"):
        strike(lab, "carrier_loss")
    assert lab.log[-1] == "heal 1 0"


def test_a_fault_that_the_lab_refuses_is_no_measurement() -> None:
    with pytest.raises(StrikeError, match="cut: refused"):
        strike(FakeLab(refuses="cut"), "carrier_loss")


@pytest.mark.parametrize(("missed", "succeeds"), [(0, True), (4, True), (5, False)])
def test_a_fault_that_misses_the_calls_is_repeated(
    monkeypatch: pytest.MonkeyPatch, missed: int, succeeds: bool
) -> None:
    outcomes: list[Any] = [MissedError("a busy machine")] * missed + [strike(FakeLab(), KINDS[0])]

    def outcome(*_: Any) -> Any:
        made = outcomes.pop(0)
        if isinstance(made, MissedError):
            raise made
        return made

    monkeypatch.setattr(stalls, "_strike", outcome)
    lab: Any = None
    if succeeds:
        assert stalls._measure(lab, lab, lab, KINDS[0], SIZES[0], 0).kind == KINDS[0]
    else:
        with pytest.raises(MissedError, match="a busy machine"):
            stalls._measure(lab, lab, lab, KINDS[0], SIZES[0], 0)


@pytest.mark.slow
def test_real_faults_in_a_lab() -> None:
    try:
        faults = run(1, lambda line: None)
    except LabUnavailableError as error:
        pytest.skip(f"no lab: {error}")
    assert [(s.kind, s.bytes, s.faults) for s in summarise(faults)] == [
        (kind, size, 1) for kind in KINDS for size in SIZES
    ]
    for fault in faults:
        assert fault.stall_ms > 0
        assert fault.undisturbed_ms > 0
        assert fault.next_ratio > 0
