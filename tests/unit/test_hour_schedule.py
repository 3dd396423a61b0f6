"""The schedule of an hour: its contents and its limits."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from r2serve.lab import schedule as schedules
from r2serve.lab.kinds import KINDS, FaultMaker
from r2serve.lab.schedule import (
    HOUR_S,
    LONGEST_OUTAGE_S,
    Aim,
    Fault,
    Schedule,
    ScheduleError,
    compressed_hour,
    is_second,
)

PORTS = set(itertools.product((0, 1), (0, 1)))
SEEDS = range(50)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_hour_has_every_kind_at_every_port(seed: int) -> None:
    hour = compressed_hour(seed)
    assert len(hour.faults) > 40
    assert {fault.kind for fault in hour.faults} == set(KINDS)
    assert {(f.node, f.rail) for f in hour.faults if isinstance(f.rail, int)} == PORTS
    for aim in (Aim.IN_USE, Aim.IDLE, Aim.MANAGEMENT):
        assert {fault.node for fault in hour.faults if fault.rail is aim} == {0, 1}
    assert len({fault.kind for fault in hour.faults if fault.rail is Aim.MANAGEMENT}) >= 4
    pairs = itertools.pairwise(hour.faults)
    assert any(a.rail is Aim.MANAGEMENT and b.at_s < a.end_s for a, b in pairs)
    outages = [fault for fault in hour.faults if fault.rail is Aim.ALL]
    assert [fault.duration_s for fault in outages] == [8.0]
    seconds = [i for i in range(len(hour.faults)) if is_second(hour.faults, i)]
    assert len(seconds) >= 5
    assert max(fault.end_s for fault in hour.faults) <= HOUR_S


def test_a_seed_decides_everything() -> None:
    assert compressed_hour(3) == compressed_hour(3)
    assert len({compressed_hour(seed) for seed in SEEDS}) == len(SEEDS)


def test_a_part_of_an_hour_has_no_long_outage() -> None:
    part = compressed_hour(5, 30)
    assert len(part.faults) >= 4
    assert max(fault.end_s for fault in part.faults) <= 30
    assert all(fault.rail is not Aim.ALL for fault in part.faults)
    assert any(is_second(part.faults, i) for i in range(len(part.faults)))
    assert any(fault.rail is Aim.MANAGEMENT for fault in part.faults)


def test_all_kinds_strike_the_management_nic_in_some_hours() -> None:
    hours = (compressed_hour(seed) for seed in SEEDS)
    kinds = {f.kind for hour in hours for f in hour.faults if f.rail is Aim.MANAGEMENT}
    assert kinds == set(KINDS)


def test_more_nodes_and_rails_are_covered_too() -> None:
    hour = compressed_hour(0, nodes=3, rails=4)
    assert {fault.node for fault in hour.faults} == {0, 1, 2}
    assert {f.rail for f in hour.faults if isinstance(f.rail, int)} == {0, 1, 2, 3}


def test_a_new_kind_needs_one_entry_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(lab: object, node: int, rail: int) -> None: ...

    monkeypatch.setitem(KINDS, "dim", FaultMaker(nothing, nothing, leaves_up=False))
    hour = compressed_hour(0)
    dim = [index for index, fault in enumerate(hour.faults) if fault.kind == "dim"]
    assert len(dim) >= 2
    # A rail that is both idle and dim, or dim while the other rail is lost, would go unnoticed.
    assert {hour.label(index) for index in dim} <= {"dim", "dim, management NIC"}


@pytest.mark.parametrize(("seconds", "rails", "field"), [(5, 2, "seconds"), (300, 1, "rails")])
def test_no_hour_without_time_or_a_second_rail(seconds: float, rails: int, field: str) -> None:
    with pytest.raises(ScheduleError, match=f"^{field} is"):
        compressed_hour(0, seconds, rails=rails)


GOOD = Fault(1.0, "carrier_loss", 0, 1, 2.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "earthquake"),
        ("node", 2),
        ("node", -1),
        ("rail", 2),
        ("rail", -1),
        ("at_s", -0.1),
        ("duration_s", 0.1),
        ("duration_s", 25.0),
        ("duration_s", 9.5),
        ("at_s", float("nan")),
        ("duration_s", float("inf")),
    ],
)
def test_a_wrong_field_is_named(field: str, value: object) -> None:
    with pytest.raises(ScheduleError, match=rf"^faults\[1\]\.{field} is"):
        Schedule((replace(GOOD, at_s=0.0, duration_s=0.5), replace(GOOD, **{field: value})), 10)


def test_a_schedule_without_length_is_refused() -> None:
    for seconds in (0, -1, float("nan")):
        with pytest.raises(ScheduleError, match=r"^seconds is"):
            Schedule((), seconds)


def test_times_must_be_sorted() -> None:
    with pytest.raises(ScheduleError, match=r"^faults\[1\]\.at_s is 1: before faults\[0\]"):
        Schedule((replace(GOOD, at_s=4.0), GOOD), 10)


@pytest.mark.parametrize("node", [0, 1])
def test_a_rail_is_not_taken_twice_at_once(node: int) -> None:
    with pytest.raises(ScheduleError, match=r"^faults\[1\]\.rail is 1: already hit by faults\[0\]"):
        Schedule((GOOD, replace(GOOD, at_s=2.0, node=node)), 10)
    Schedule((GOOD, replace(GOOD, at_s=3.0, node=node)), 10)


@pytest.mark.parametrize("aim", [Aim.IN_USE, Aim.IDLE, Aim.ALL])
def test_only_faults_of_given_ports_overlap(aim: Aim) -> None:
    for pair in ((GOOD, replace(GOOD, at_s=2.0, rail=aim)), (replace(GOOD, rail=aim), GOOD)):
        with pytest.raises(ScheduleError, match=r"^faults\[1\]\.at_s is"):
            Schedule(pair, 10)


def test_a_rail_is_lost_after_the_management_nic_and_before() -> None:
    away = replace(GOOD, at_s=2.0, rail=Aim.MANAGEMENT)
    Schedule((GOOD, away), 10)
    Schedule((away, replace(GOOD, at_s=3.0)), 10)
    with pytest.raises(ScheduleError, match=r"^faults\[1\]\.rail is .* already hit by faults\[0\]"):
        Schedule((away, replace(away, at_s=3.0)), 10)


def test_some_rail_comes_back_in_time() -> None:
    first = Fault(0.0, "carrier_loss", 0, 0, 20.0)
    allowed = Fault(1.0, "peer_port_loss", 1, 1, LONGEST_OUTAGE_S)
    Schedule((first, allowed), 60)
    with pytest.raises(ScheduleError, match=r"^faults\[1\]\.duration_s is 10.5: no rail would"):
        Schedule((first, replace(allowed, duration_s=10.5)), 60)
    # Outages in succession count as a single long outage; a third rail prevents an outage.
    relay = (first, replace(allowed, duration_s=6.0), replace(allowed, at_s=7.0, duration_s=6.0))
    with pytest.raises(ScheduleError, match=r"^faults\[2\]\.duration_s is 6: no rail would"):
        Schedule(relay, 60)
    Schedule(relay, 60, rails=3)
    with pytest.raises(ScheduleError, match=r"^faults\[0\]\.duration_s is 11: no rail would"):
        Schedule((Fault(0.0, "carrier_loss", 0, Aim.ALL, 11.0),), 60)


def test_labels_name_special_faults() -> None:
    hour = Schedule(
        (
            Fault(0.0, "carrier_loss", 0, 0, 3.0),
            Fault(1.0, "peer_port_loss", 1, 1, 1.0),
            Fault(5.0, "flap", 0, Aim.IN_USE, 1.0),
            Fault(7.0, "address_loss", 0, Aim.IDLE, 1.0),
            Fault(9.0, "carrier_loss", 0, Aim.ALL, 1.0),
            Fault(11.0, "reset", 0, 0, 3.0),
            Fault(12.0, "black_hole", 1, Aim.MANAGEMENT, 1.0),
        ),
        20,
    )
    assert [hour.label(index) for index in range(7)] == [
        "carrier_loss",
        "peer_port_loss, second fault",
        "flap",
        "address_loss, idle rail",
        "carrier_loss, all rails",
        "reset",
        "black_hole, management NIC, second fault",
    ]


def test_gaps_between_faults_are_bounded() -> None:
    hour = compressed_hour(0)
    begins = [fault.at_s for fault in hour.faults]
    gaps = [b - a for a, b in itertools.pairwise(begins)]
    assert max(gaps) < 2 * schedules._SLOT_S + 1
