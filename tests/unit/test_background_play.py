"""Plays faults during a measurement: start, end, and errors."""

from __future__ import annotations

import math
import threading
import time

import pytest

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
        while len(play.played) < 2:
            time.sleep(0.001)
    assert sorted(injector.done) == [("make", 0), ("make", 1), ("undo", 0), ("undo", 1)]
    assert injector.done[-1][0] == "undo"
    for played in play.played:
        assert played.healed_ns is not None
        assert played.struck_ns < played.healed_ns


def test_a_fault_that_is_not_due_is_never_made() -> None:
    injector = FakeInjector()
    begun = time.monotonic()
    with BackgroundPlay(Player([Fault(60.0, "carrier_loss", 0, 0, 1.0)], injector)) as play:
        pass
    assert time.monotonic() - begun < 30
    assert injector.done == []
    assert play.played == []


def test_the_play_waits_for_its_begin() -> None:
    injector = FakeInjector()
    begun_ns = 0
    with BackgroundPlay(Player([stays(1)], injector), lambda: begun_ns) as play:
        assert not injector.struck.wait(0.05)
        begun_ns = time.monotonic_ns()
        assert injector.struck.wait(30)
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
    with BackgroundPlay(Player([Fault(0.0, "carrier_loss", 0, 1, 20.0)], injector)) as play:
        while not play.played:
            time.sleep(0.001)


def test_an_error_beside_the_play_heals_all_and_goes_on() -> None:
    injector = FakeInjector()

    def measure() -> None:
        with BackgroundPlay(Player([stays(0)], injector)):
            assert injector.struck.wait(30)
            raise RuntimeError("the load is gone")

    with pytest.raises(RuntimeError, match="the load is gone"):
        measure()
    assert injector.done == [("make", 0), ("undo", 0)]
