"""A play of faults beside a measurement."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from r2serve.lab.player import Played, Player

LOOK_S = 0.01


class BackgroundPlay:
    """Plays faults on a thread of its own; leaving the context ends the play and heals all.

    begun_ns: the origin of the faults' times (CLOCK_MONOTONIC); 0 while the thread has to wait for
    it. By default the play begins at once. An error of the thread is raised on leaving.
    """

    def __init__(self, player: Player, begun_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._player = player
        self._begun_ns = begun_ns
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="lab-faults")

    @property
    def played(self) -> list[Played]:
        """All faults so far, in the order in which they struck."""
        return self._player.played

    def __enter__(self) -> BackgroundPlay:
        self._playing = self._pool.submit(self._play)
        return self

    def __exit__(self, *_: object) -> None:
        self._player.over.set()
        self._pool.shutdown()
        self._playing.result()

    def _play(self) -> None:
        while not (begun_ns := self._begun_ns()):
            if self._player.over.wait(LOOK_S):
                return
        self._player.play(begun_ns / 1e9)
