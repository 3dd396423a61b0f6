"""Steps of a worker over rails that are really lost, for tests of the cost to requests."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from ports import free_port
from timely import timely

from r2serve import Communicator
from r2serve.config import Config
from r2serve.observe import journal
from r2serve.observe.attribution import Attribution, NewRequest, Step, next_step

OUTAGE_S = 0.2


class Job:
    """Two ranks of this process that share a group over two loopback rails."""

    def __init__(self, folder: Path) -> None:
        port = free_port()
        self.pool = ThreadPoolExecutor(2)

        def make(rank: int) -> Communicator:
            config = Config(
                rails="127.0.0.1,127.0.0.2",
                node=f"n{rank}",
                journal_dir=str(folder) if rank == 0 else "",
                rejoin_backoff_min_ms=1,
                rejoin_backoff_max_ms=5,
                dead_deadline_ms=60_000,  # the pauses of a starved machine make no rail suspect
            )
            return Communicator.standalone(
                "127.0.0.1", port, rank, 2, name="tp:0", config=config, share_engine=False
            )

        self.ranks = list(self.pool.map(make, range(2)))
        self.engine = self.ranks[0]._process.engine
        self.number = 0
        self.attribution = Attribution(lambda: [self.engine], {"model_name": "m", "engine": "3"})

    def all_reduce(self, *, outage: bool = False) -> float:
        """Runs an all-reduce on both ranks; returns rank 0's duration in seconds.

        outage: all rails are cut before the call, and for OUTAGE_S seconds of the call. Without
        an outage, the call begins once all rails are UP.
        """

        def call(rank: int) -> float:
            began = time.monotonic()
            self.ranks[rank].all_reduce(torch.ones(1000))
            return time.monotonic() - began

        if outage:
            self.lose_all_rails()
        else:
            # The rails may still be on their way back from an outage, which would stall the call.
            timely(self.all_rails_are_up, "all rails are UP", within_s=120)
        first, second = (self.pool.submit(call, rank) for rank in range(2))
        if outage:
            try:
                # A call that failed has ended, and its error is raised below.
                timely(
                    lambda: self.is_in_a_call() or first.done() or second.done(),
                    "the begin of rank 0's call is in the journal",
                    within_s=120,
                )
                time.sleep(OUTAGE_S)
            finally:
                self.heal()
        second.result()
        return first.result()

    def all_rails_are_up(self) -> bool:
        rails = [rail for rank in self.ranks for rail in rank.rails() if rail.kind == "tcp"]
        return all(rail.state == "UP" for rail in rails)

    def is_in_a_call(self) -> bool:
        read = journal.parse(self.engine.journal_bytes(), events=False)
        return any(group.call for group in read.groups)

    def step(self, *, outage: bool = False, **parts: Any) -> float:
        fields: dict[str, Any] = {"prefill": [], "decode": [], "yielding": []}
        fields |= parts
        if not fields["prefill"]:
            fields.setdefault("tokens", len(fields["decode"]))
        self.number = next_step(self.number)
        self.attribution.began(Step(number=self.number, **fields))
        took_s = self.all_reduce(outage=outage)
        self.attribution.ended(sampled=True)
        return took_s

    def lose_all_rails(self) -> None:
        for rank in self.ranks:
            rank.inject(0, "carrier_loss")
            rank.inject(1, "carrier_loss")

    def heal(self) -> None:
        for rank in self.ranks:
            rank.inject(0, "heal")
            rank.inject(1, "heal")

    def close(self) -> None:
        self.attribution.close()  # otherwise a timer logs during a later test
        list(self.pool.map(lambda rank: rank.close(), self.ranks))
        self.pool.shutdown()


def new(*names: str) -> list[NewRequest]:
    return [NewRequest(f"id-{name}", name, 4) for name in names]
