"""The player of a schedule: its commands to the lab, their times, and its records."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from timely import timely

from r2serve.lab import player as players
from r2serve.lab.injector import LabInjector
from r2serve.lab.kinds import KINDS, FaultMaker
from r2serve.lab.player import Player
from r2serve.lab.schedule import Aim, Fault, Schedule

pytestmark = pytest.mark.slow


class FakeLab:
    """Ports and rails of two nodes; a single rail carries the traffic."""

    rails = 2

    def __init__(self) -> None:
        self.log: list[tuple[float, str, int, int | None]] = []
        self.lost: set[int] = set()
        self.in_use = 1
        self.deaf = False
        self.begun = time.monotonic()
        self._ticks = itertools.count(1)

    def make(self, lab: object, node: int, rail: int | None) -> None:
        assert lab is self
        self.lost |= set() if rail is None else {rail}
        self.log.append((time.monotonic() - self.begun, "make", node, rail))

    def undo(self, lab: object, node: int, rail: int | None) -> None:
        assert lab is self
        self.lost -= {rail}
        self.log.append((time.monotonic() - self.begun, "undo", node, rail))

    def down(self) -> set[int] | None:
        return {0} if self.deaf else set(self.lost)

    def sent_bytes(self) -> Counter[int]:
        return Counter({self.in_use: 4096 * next(self._ticks)})

    def steps(self) -> list[tuple[str, int, int | None]]:
        return [entry[1:] for entry in self.log]


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> FakeLab:
    fake = FakeLab()
    monkeypatch.setitem(KINDS, "loss", FaultMaker(fake.make, fake.undo))
    monkeypatch.setitem(KINDS, "blink", FaultMaker(fake.make, fake.undo, cycle_s=(0.2, 0.1)))
    for name in ("LOOK_S", "TRAFFIC_S"):
        monkeypatch.setattr(players, name, 0.01)
    monkeypatch.setattr(players, "AIM_TIMEOUT_S", 0.1)
    monkeypatch.setattr(players, "REJOIN_TIMEOUT_S", 0.3)
    return fake


def player(lab: Any, *faults: Fault, attend: Callable[[], None] = lambda: None) -> Player:
    seconds = max(fault.end_s for fault in faults) + 0.1
    schedule = Schedule(faults, seconds)
    return Player(
        schedule.faults,
        LabInjector(lab),
        seconds=schedule.seconds,
        rails=lab,
        attend=attend,
        poll_s=0.01,
    )


def test_every_fault_is_made_and_undone_at_its_time(lab: FakeLab) -> None:
    made = player(lab, Fault(0.1, "loss", 0, 1, 0.5), Fault(0.8, "loss", 1, 0, 0.5))
    assert made.play()
    assert lab.steps() == [("make", 0, 1), ("undo", 0, 1), ("make", 1, 0), ("undo", 1, 0)]
    for (at_s, *_), due_s in zip(lab.log, (0.1, 0.6, 0.8, 1.3), strict=True):
        assert due_s <= at_s
        timely(lambda: at_s < due_s + 2.0, f"due at {due_s} s, done at {at_s} s", within_s=0)  # noqa: B023
    assert time.monotonic() - lab.begun >= 1.4
    for one in made.played:
        assert one.healed_ns is not None
        assert one.back_ns is not None
        assert one.struck_ns < one.healed_ns <= one.back_ns


@pytest.mark.parametrize(
    ("aim", "rails"), [(Aim.IN_USE, (1,)), (Aim.IDLE, (0,)), (Aim.ALL, (0, 1))]
)
def test_a_fault_aims_by_the_traffic_of_the_rails(
    lab: FakeLab, aim: Aim, rails: tuple[int, ...]
) -> None:
    made = player(lab, Fault(0.0, "loss", 1, aim, 0.5))
    assert made.play()
    assert made.played[0].rails == rails
    assert lab.steps() == [(what, 1, rail) for what in ("make", "undo") for rail in rails]


def test_a_second_fault_strikes_while_the_first_lasts(lab: FakeLab) -> None:
    made = player(lab, Fault(0.0, "loss", 0, 0, 0.9), Fault(0.3, "loss", 1, 1, 0.5))
    assert made.play()
    assert lab.steps() == [("make", 0, 0), ("make", 1, 1), ("undo", 1, 1), ("undo", 0, 0)]
    assert [one.label for one in made.played] == ["loss", "loss, second fault"]
    late_s = made.played[1].late_s  # the first fault ends 0.6 s later
    timely(lambda: late_s < 0.6, f"the second fault is {late_s:.2f} s late", within_s=0)


def test_the_management_nic_is_lost_while_a_rail_is_lost(lab: FakeLab) -> None:
    faults = (Fault(0.0, "loss", 0, 0, 0.9), Fault(0.3, "loss", 1, Aim.MANAGEMENT, 0.5))
    made = player(lab, *faults)
    assert made.play()
    assert lab.steps() == [("make", 0, 0), ("make", 1, None), ("undo", 1, None), ("undo", 0, 0)]
    assert [one.rails for one in made.played] == [(0,), ()]
    late_s = made.played[1].late_s  # the first fault ends 0.6 s later
    timely(lambda: late_s < 0.6, f"the second fault is {late_s:.2f} s late", within_s=0)


def test_a_repeating_fault_ends_undone(lab: FakeLab) -> None:
    made = player(lab, Fault(0.0, "blink", 0, 0, 0.9))
    assert made.play()
    assert lab.steps() == [("make", 0, 0), ("undo", 0, 0)] * 3
    assert lab.lost == set()


def test_a_fault_waits_for_its_rail_and_delays_later_faults(lab: FakeLab) -> None:
    lab.deaf = True
    made = player(lab, Fault(0.0, "loss", 0, 0, 0.5), Fault(0.6, "loss", 0, 1, 0.5))
    assert not made.play()
    assert all(one.late_s > 0.1 for one in made.played)
    timely(lambda: all(one.late_s < 2.0 for one in made.played), "faults are late", within_s=0)
    assert lab.log[2][0] >= 1.2
    assert [one.back_ns for one in made.played] == [None, None]


def test_an_error_during_the_play_heals_everything(lab: FakeLab) -> None:
    def attend() -> None:
        if len(lab.lost) == 2:
            raise RuntimeError("the server is gone")

    made = player(lab, Fault(0.0, "loss", 0, 0, 1.0), Fault(0.1, "loss", 1, 1, 1.0), attend=attend)
    with pytest.raises(RuntimeError, match="the server is gone"):
        made.play()
    assert lab.lost == set()
    for one in made.played:
        assert one.healed_ns is not None
        assert one.back_ns is None


def test_a_play_ended_early_heals_everything_and_waits_for_the_rails(lab: FakeLab) -> None:
    def attend() -> None:
        if lab.lost:
            made.over.set()

    made = player(
        lab, Fault(0.0, "loss", 0, 1, 20.0), Fault(20.0, "loss", 1, 0, 1.0), attend=attend
    )
    assert made.play()
    assert lab.steps() == [("make", 0, 1), ("undo", 0, 1)]
    took_s = time.monotonic() - lab.begun
    timely(lambda: took_s < 15, f"a play ended early took {took_s:.1f} s", within_s=0)
    (one,) = made.played
    assert one.healed_ns is not None
    assert one.back_ns is not None
    assert one.struck_ns < one.healed_ns <= one.back_ns


def test_a_play_ended_early_waits_for_rails_up_to_the_timeout(lab: FakeLab) -> None:
    def attend() -> None:
        lab.deaf = bool(lab.log)
        if lab.lost:
            made.over.set()

    made = player(lab, Fault(0.0, "loss", 0, 1, 20.0), attend=attend)
    assert not made.play()
    assert time.monotonic() - lab.begun >= players.REJOIN_TIMEOUT_S
    assert made.played[0].back_ns is None


def test_without_rail_counters_the_rail_in_use_must_be_given(lab: Any) -> None:
    injector = LabInjector(lab)
    for rail, aim in ((Aim.IN_USE, None), (Aim.IDLE, lambda: 1)):
        with pytest.raises(ValueError, match="rails: must be given"):
            Player([Fault(0.0, "loss", 0, rail, 1.0)], injector, aim=aim)
    made = Player([Fault(0.0, "loss", 0, Aim.IN_USE, 0.01)], injector, seconds=0, aim=lambda: 1)
    assert made.play()
    assert lab.steps() == [("make", 0, 1), ("undo", 0, 1)]
