"""Plays faults on a thread, concurrently with a measurement."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from r2serve.lab.player import Played, Player

LOOK_S = 0.01


class BackgroundPlay:
    """Plays faults on a separate thread; leaving the context ends the play and heals all faults.

    begun_ns: returns the time origin of the faults (CLOCK_MONOTONIC in ns), or 0 while the thread
    must still wait. By default the play begins at once. Leaving re-raises an error of the thread.
    """

    def __init__(self, player: Player, begun_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._player = player
        self._begun_ns = begun_ns
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="lab-faults")

    @property
    def played(self) -> list[Played]:
        """All faults so far, in order of their strikes."""
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
