"""Faults of a scenario beside the requests of a load."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from r2serve.bench.serve.scenarios import AIM_S, line_of
from r2serve.lab.background import BackgroundPlay
from r2serve.lab.injector import LabInjector
from r2serve.lab.lab import Lab
from r2serve.lab.player import Player
from r2serve.lab.schedule import Fault


def strikes(
    lab: Lab,
    faults: Sequence[Fault],
    begun_ns: Callable[[], int],
    aim: Callable[[], int],
    watch: Callable[[str], None] = lambda _: None,
) -> BackgroundPlay:
    """The faults as a background play.

    Making a fault on the machine that serves takes processor time, unlike a fault of a network.
    The player therefore chooses the rail ``AIM_S`` before.

    begun_ns: CLOCK_MONOTONIC of the first request, the origin of the faults' times; 0 while it is
    awaited. aim: which rail of a node carries most. watch: is told what is about to happen, a line
    each.
    """
    player = Player(faults, LabInjector(lab), aim=aim, ahead_s=AIM_S, watch=watch, text_of=line_of)
    return BackgroundPlay(player, begun_ns)
