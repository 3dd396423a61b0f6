"""Plays the faults of a scenario during a load."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from r2serve.bench.serve.scenarios import AIM_S, line_of
from r2serve.lab.background import BackgroundPlay
from r2serve.lab.injector import LabInjector
from r2serve.lab.lab import Lab
from r2serve.lab.player import Played, Player
from r2serve.lab.schedule import Fault
from r2serve.lab.serving.client import Run


class MissedFaultsError(RuntimeError):
    """The requests of a run ended before some of its faults."""

    def __init__(self, planned: int, made: int) -> None:
        super().__init__(
            f"{made} of {planned} faults were made before the last token of the run: use more "
            "requests, or requests with more tokens"
        )
        self.missed = planned - made


def check_made(planned: Sequence[Fault], played: Sequence[Played], run: Run) -> None:
    """Checks that every planned fault struck before the last token of a run.

    A run with failed requests may end early, because the failures tell of the faults before.

    Raises:
        MissedFaultsError: a fault did not strike in time, although no request failed.
    """
    last_ns = max((each.times_ns[-1] for each in run.requests if each.times_ns), default=0)
    made = sum(each.struck_ns < last_ns for each in played)
    if made < len(planned) and not run.failed:
        raise MissedFaultsError(len(planned), made)


def strikes(
    lab: Lab,
    faults: Sequence[Fault],
    begun_ns: Callable[[], int],
    aim: Callable[[], int],
    watch: Callable[[str], None] = lambda _: None,
) -> BackgroundPlay:
    """Returns a background play of the faults.

    The faults are made on the serving machine and take CPU time, unlike faults of a real network.
    The player therefore determines the busiest rail ``AIM_S`` before each fault.

    begun_ns: returns the time of the first request (CLOCK_MONOTONIC, ns), the origin of the
    faults' times; 0 before the first request. aim: returns the busiest rail. watch: receives a
    line before each fault.
    """
    player = Player(faults, LabInjector(lab), aim=aim, ahead_s=AIM_S, watch=watch, text_of=line_of)
    return BackgroundPlay(player, begun_ns)
