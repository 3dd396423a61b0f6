"""Two engines of one process with rails in between, for tests of the engine's outside view."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from timely import timely

from r2serve import _core
from r2serve.config import Config
from r2serve.errors import StartupTimeoutError
from r2serve.ports.info import ProcessInfo
from r2serve.process import Process

WAIT_S = 60.0


class Pair:
    """Two engines of this process, connected by two loopback rails."""

    def __init__(
        self, folder: Path, *, both: bool = False, dead: int | None = None, **options: Any
    ) -> None:
        """Creates the engines; the first, and with `both` the second, keeps a journal in `folder`.

        dead: a rail whose port no engine listens on, so that the rail never comes up. options:
        configuration of the first engine.
        """
        self.folder = folder
        here = Config(rails="127.0.0.1,127.0.0.2", node="here", journal_dir=str(folder), **options)
        there = Config(
            rails="127.0.0.1,127.0.0.2", node="there", journal_dir=str(folder) if both else ""
        )
        self.ends = [Process(here, 0, None), Process(there, 1, None)]
        for own, peer in (self.ends, self.ends[::-1]):
            own.add_peer(_without(peer.info, dead), f"rank {peer.rank_hint}", own.rank_hint)
        for own, peer in (self.ends, self.ends[::-1]):
            connect(own.engine, peer.info.process)
        self.engine = self.ends[0].engine

    def wait_for_state(self, rail: int, state: str) -> None:
        timely(
            lambda: self.engine.rails()[rail]["state"] == state,
            f"rail {rail} is {state}",
            within_s=WAIT_S,
            every_s=0.005,
        )

    def cut_and_heal(self, rail: int) -> None:
        """Cuts and heals a rail; returns when the rail is UP in a later epoch."""
        before = self.engine.rails()[rail]["epoch"]
        self.engine.inject(rail, "carrier_loss")
        self.engine.inject(rail, "heal")

        def is_back() -> bool:
            now = self.engine.rails()[rail]
            return now["epoch"] != before and now["state"] == "UP"

        timely(is_back, f"rail {rail} is UP again", within_s=WAIT_S, every_s=0.005)

    def close(self) -> None:
        for end in self.ends:
            if end.drills is not None:
                end.drills.close()
            end.engine.close(0.0)


def _without(info: ProcessInfo, dead: int | None) -> ProcessInfo:
    """Replaces the listening port of a rail by a port without a listener."""
    ports = [
        dataclasses.replace(port, port=1) if rail == dead else port
        for rail, port in enumerate(info.ports)
    ]
    return dataclasses.replace(info, ports=tuple(ports))


def connect(engine: _core.Engine, process: int) -> None:
    """Opens the rails without waiting until they are UP."""
    try:
        engine.connect([process], 0.0)
    except StartupTimeoutError:
        return
