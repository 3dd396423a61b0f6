"""Reading a stall out of the times of back-to-back collectives."""

from __future__ import annotations

import pytest

from r2serve.bench.collectives.stalls import KINDS, analyse, run, summarise
from r2serve.bench.collectives.strikes import (
    SIZES,
    Soak,
    StrikeError,
    hit_call,
    in_use,
    rail_index,
)
from r2serve.lab.holder import LabUnavailableError

MS = 1_000_000


def test_the_hit_call_is_the_longest_of_any_rank_after_the_fault() -> None:
    # Rank 0: 10 calls of 1 ms, one of 8 ms from 10 ms on, then 5 of 2 ms.
    rank0 = Soak(0, [MS] * 10 + [8 * MS] + [2 * MS] * 5)
    rank1 = Soak(0, [MS] * 10 + [9 * MS] + [2 * MS] * 5)
    stall, undisturbed, following = analyse([rank0, rank1], struck_ns=12 * MS)
    assert stall == 9 * MS
    assert undisturbed == MS
    assert following == [2 * MS] * 5


def test_a_slow_call_before_the_fault_is_the_machines_and_not_a_stall() -> None:
    soak = Soak(100 * MS, [MS, 50 * MS, MS, 3 * MS, MS])
    stall, undisturbed, following = analyse([soak], struck_ns=153 * MS)
    assert (stall, undisturbed) == (3 * MS, 50 * MS)
    assert following == [MS]


def test_the_call_in_flight_counts_though_it_began_before_the_fault() -> None:
    soak = Soak(0, [MS, 30 * MS, MS])
    assert analyse([soak], struck_ns=2 * MS)[0] == 30 * MS


def test_a_slow_call_long_after_the_fault_is_the_machines_too() -> None:
    soak = Soak(0, [MS, 4 * MS, *([MS] * 400), 90 * MS, MS])
    stall, _, following = analyse([soak], struck_ns=2 * MS)
    assert stall == 4 * MS
    assert following == [MS] * 100


def test_a_stall_counts_in_full_however_long_it_is() -> None:
    assert analyse([Soak(0, [MS, 5000 * MS, MS])], struck_ns=2 * MS)[0] == 5000 * MS


@pytest.mark.parametrize("struck_ns", [0, 10 * MS])
def test_a_fault_outside_the_collectives_is_no_measurement(struck_ns: int) -> None:
    with pytest.raises(StrikeError, match="did not fall"):
        analyse([Soak(MS, [MS, MS, MS])], struck_ns)


def test_without_calls_after_the_hit_one_nothing_can_be_said_of_the_next() -> None:
    with pytest.raises(StrikeError, match="no collective followed"):
        analyse([Soak(0, [MS, MS, 5 * MS])], struck_ns=2 * MS + 1)


def test_rails_are_numbered_by_their_name() -> None:
    assert rail_index("rail1@node0") == 1


def test_no_call_is_hit_by_what_happens_after_the_last() -> None:
    assert hit_call([Soak(0, [MS, MS])], struck_ns=3 * MS) is None
    assert hit_call([Soak(0, [MS, 2 * MS]), Soak(0, [MS])], struck_ns=2 * MS) == (2 * MS, 1)


def test_rails_that_carry_next_to_nothing_are_not_in_use() -> None:
    assert in_use({0: 0, 1: 10, 2: 0}, {0: 1000, 1: 59, 2: 500}) == [0, 2]
    assert in_use({0: 0, 1: 10}, {0: 1000, 1: 1010}) == [0, 1]


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
