"""Plays faults during a measurement: start, end, and errors."""

from __future__ import annotations

import math
import threading
import time

import pytest
from timely import timely

from r2serve.lab.background import BackgroundPlay
from r2serve.lab.player import Player
from r2serve.lab.schedule import Fault


class FakeInjector:
    """Records each fault; the command `refuses` fails."""

    rails = 2

    def __init__(self, refuses: str = "") -> None:
        self.done: list[tuple[str, int | None]] = []
        self.struck = threading.Event()
        self._refuses = refuses

    def make(self, kind: str, node: int, rail: int | None) -> None:
        self._note("make", rail)
        self.struck.set()

    def undo(self, kind: str, node: int, rail: int | None) -> None:
        self._note("undo", rail)

    def _note(self, word: str, rail: int | None) -> None:
        self.done.append((word, rail))
        if word == self._refuses:
            raise OSError(f"{word} of rail {rail} is refused")


def stays(rail: int) -> Fault:
    return Fault(0.0, "carrier_loss", 0, rail, math.inf)


def test_all_faults_are_healed_on_leaving() -> None:
    injector = FakeInjector()
    with BackgroundPlay(Player([stays(0), stays(1)], injector)) as play:
        timely(lambda: len(play.played) == 2, "both faults are made")
    assert sorted(injector.done) == [("make", 0), ("make", 1), ("undo", 0), ("undo", 1)]
    assert injector.done[-1][0] == "undo"
    for played in play.played:
        assert played.healed_ns is not None
        assert played.struck_ns < played.healed_ns


def test_a_fault_that_is_not_due_is_never_made() -> None:
    injector = FakeInjector()
    begun = time.monotonic()
    with BackgroundPlay(Player([Fault(600.0, "carrier_loss", 0, 0, 1.0)], injector)) as play:
        pass
    took_s = time.monotonic() - begun
    assert injector.done == []
    assert play.played == []
    timely(lambda: took_s < 300, f"the play ended after {took_s:.1f} s", within_s=0)


def test_the_play_waits_for_its_begin() -> None:
    injector = FakeInjector()
    begun_ns = 0
    with BackgroundPlay(Player([stays(1)], injector), lambda: begun_ns) as play:
        assert not injector.struck.wait(0.05)
        begun_ns = time.monotonic_ns()
        assert injector.struck.wait(120)
    assert play.played[0].struck_ns >= begun_ns


def test_a_begin_that_never_comes_makes_no_fault() -> None:
    injector = FakeInjector()
    with BackgroundPlay(Player([stays(1)], injector), lambda: 0):
        assert not injector.struck.wait(0.05)
    assert injector.done == []


@pytest.mark.parametrize("refuses", ["make", "undo"])
def test_an_error_of_the_thread_is_raised_on_leaving(refuses: str) -> None:
    injector = FakeInjector(refuses)
    with pytest.raises(OSError, match=f"{refuses} of rail 1 is refused"):
        run(injector)
    # A half made fault is undone as well.
    assert injector.done == [("make", 1), ("undo", 1)]


def run(injector: FakeInjector) -> None:
    with BackgroundPlay(Player([Fault(0.0, "carrier_loss", 0, 1, 600.0)], injector)) as play:
        timely(lambda: play.played, "the fault is made")


def test_an_error_beside_the_play_heals_all_and_goes_on() -> None:
    injector = FakeInjector()

    def measure() -> None:
        with BackgroundPlay(Player([stays(0)], injector)):
            assert injector.struck.wait(120)
            raise RuntimeError("the load is gone")

    with pytest.raises(RuntimeError, match="the load is gone"):
        measure()
    assert injector.done == [("make", 0), ("undo", 0)]
