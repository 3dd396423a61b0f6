"""Plays a schedule's faults on a lab while requests are under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from r2serve.bench.serve.scenarios import AIM_S, line_of
from r2serve.lab.holder import LabCommandError
from r2serve.lab.lab import Lab
from r2serve.lab.player import Played, Player
from r2serve.lab.schedule import Fault


class Strikes:
    """Makes faults on a thread of its own, and undoes all of them when it is left.

    Making a fault on the machine that serves takes processor time, which no fault of a network
    does: the rail is chosen ``AIM_S`` before.

    begun_ns: CLOCK_MONOTONIC of the first request, which times count from; 0 while it is awaited.
    aim: which rail of a node carries most. watch: is told what is about to happen, a line each.
    What goes wrong on the thread is raised on leaving.
    """

    def __init__(
        self,
        lab: Lab,
        faults: Sequence[Fault],
        begun_ns: Callable[[], int],
        aim: Callable[[], int],
        watch: Callable[[str], None],
    ) -> None:
        self._begun_ns = begun_ns
        self._over = threading.Event()
        self._player = Player(
            faults, lab, aim=aim, ahead_s=AIM_S, over=self._over, watch=watch, text_of=line_of
        )
        self._error: LabCommandError | OSError | None = None
        self._thread = threading.Thread(target=self._run, name="bench-faults")

    @property
    def struck(self) -> list[Played]:
        """What has struck so far, in that order."""
        return self._player.played

    def __enter__(self) -> Strikes:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while not self._begun_ns() and not self._over.wait(0.01):
            pass
        try:
            self._player.play(self._begun_ns() / 1e9)
        except (LabCommandError, OSError) as error:
            self._error = error
        for played in self._player.played:
            if played.healed_ns is None:  # it would have stayed
                played.healed_ns = time.monotonic_ns()
