"""Ranks of a job inside the guest. All ranks are forks of a single process, because loading torch
takes a minute in the guest (see conftest.py).
"""

from __future__ import annotations

import os
import signal
import socket
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from worker import FORK, PATIENCE_S, Shared, Worker

from r2serve import Config
from r2serve.communicator import Communicator

SLOW = 10
"""The guest is this factor slower than a real machine; time-outs are longer by the same factor."""
STOP = "stop"


class Rank:
    """A rank in a separate process. begin() sends a request, end() returns its answer, and ask()
    does both.
    """

    def __init__(
        self, number: int, world: int, port: int, config: dict[str, Any], shared: Shared
    ) -> None:
        self.number = number
        self._pipe, theirs = FORK.Pipe()
        self._process = FORK.Process(
            target=_serve, args=(theirs, number, world, port, config, shared), daemon=True
        )
        self._process.start()
        theirs.close()

    def begin(self, what: str, **arguments: Any) -> None:
        self._pipe.send((what, arguments))

    def is_through(self) -> bool:
        return self._pipe.poll(0)

    def end(self) -> Any:
        assert self._pipe.poll(PATIENCE_S), f"rank {self.number} is silent for {PATIENCE_S:g} s"
        good, answer = self._pipe.recv()
        assert good, f"rank {self.number}:\n{answer}"
        return answer

    def ask(self, what: str, **arguments: Any) -> Any:
        self.begin(what, **arguments)
        return self.end()

    def stop(self) -> None:
        """Requests an orderly close of the communicator; wait_stopped() must follow."""
        if self.is_alive():
            self.begin(STOP)

    def wait_stopped(self) -> None:
        self._process.join(30)
        self.kill()
        self._pipe.close()

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the rank's process (SIGSTOP) while the body runs."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._process.pid, signal.SIGCONT)


class Job:
    """The ranks of a job; each rank is a node."""

    def __init__(
        self,
        world: int = 2,
        rails_of: Callable[[int], str] | None = None,
        first: int | None = None,
        **config: Any,
    ) -> None:
        """Arguments:

        rails_of: returns the ``R2CCL_RAILS`` of a rank; default: its first two NICs.
        first: number of rails of a link that can come up, counted from rail 0; default: all.
        """
        self.shared = Shared()
        self._first = first
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        rails_of = rails_of or (lambda rank: f"n{rank}r0,n{rank}r1")
        options = {
            "rdma": "require",
            "connect_timeout_s": PATIENCE_S,
            "handshake_timeout_ms": 1000 * SLOW,
            "rejoin_backoff_max_ms": 500,
            "flap_half_life_s": 1.0,
            "ack_deadline_floor_ms": 20 * SLOW,
            "dead_deadline_ms": 500 * SLOW,
            "verbs_timeout": 17,  # 8 times the default
        }
        self.ranks = [
            Rank(
                rank,
                world,
                port,
                options | {"rails": rails_of(rank), "node": f"node{rank}"} | config,
                self.shared,
            )
            for rank in range(world)
        ]
        for rank in self.ranks:
            rank.end()
        self.await_up()

    def stop(self) -> None:
        for rank in self.ranks:
            rank.stop()
        for rank in self.ranks:
            rank.wait_stopped()

    def is_alive(self) -> bool:
        return all(rank.is_alive() for rank in self.ranks)

    def ask(self, what: str, **arguments: Any) -> list[Any]:
        """Sends a request to all ranks, and returns all answers. The ranks work concurrently."""
        for rank in self.ranks:
            rank.begin(what, **arguments)
        return [rank.end() for rank in self.ranks]

    def rail(self, number: int, rank: int = 0) -> dict[str, Any]:
        return dict(self.ranks[rank].ask("rails")[number])

    def states(self) -> list[list[str]]:
        return [[f"{r['name']} {r['state']}" for r in rails] for rails in self.ask("rails")]

    def await_left(self, rail: int) -> None:
        """Waits until both ends have left the rail. The rail may have rejoined since."""
        epochs = [rails[rail]["epoch"] for rails in self.ask("rails")]

        def left() -> bool:
            now = [rails[rail] for rails in self.ask("rails")]
            return all(
                is_now["state"] not in ("UP", "SUSPECT") or is_now["epoch"] > was
                for is_now, was in zip(now, epochs, strict=True)
            )

        self.eventually(f"rail{rail} given up", left)

    def await_up(self) -> None:
        self.eventually(
            "every rail UP",
            lambda: all(
                rail["state"] == "UP"
                for rails in self.ask("rails")
                for rail in rails[: self._first]
            ),
        )

    def eventually(self, what: str, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, f"{what}: not within {PATIENCE_S:g} s"
            time.sleep(0.05)

    def moves(self, since_ns: int = 0, to: str = "DOWN") -> list[tuple[int, str, str]]:
        """Returns rank, rail and cause of all moves of rails to state `to`, from the journals."""
        return [
            (rank, event["rail"].split("@")[0], event["text"].partition(" ")[2])
            for rank, events in enumerate(self.ask("events"))
            for event in events
            if f"->{to}" in event["text"] and event["time_ns"] >= since_ns
        ]

    def carried(self, rank: int = 0) -> dict[str, int]:
        """Returns the data bytes sent by a rank, per verbs rail."""
        return {
            rail["name"].split("@")[0]: rail["data_tx_bytes"]
            for rail in self.ranks[rank].ask("rails")
            if rail["kind"] == "verbs"
        }

    def sent(self) -> list[Counter[str]]:
        """Returns the data bytes sent by each rank, per kind of rail."""
        sent = [Counter[str]() for _ in self.ranks]
        for of_rank, rails in zip(sent, self.ask("rails"), strict=True):
            for rail in rails:
                of_rank[rail["kind"]] += rail["data_tx_bytes"]
        return sent

    @contextmanager
    def over_verbs(self) -> Iterator[None]:
        """Checks that every rank sends data during the body, and only over verbs."""
        before = self.sent()
        yield
        for rank, (is_now, was) in enumerate(zip(self.sent(), before, strict=True)):
            assert set(is_now - was) == {"verbs"}, f"rank {rank} has sent {dict(is_now - was)}"

    @contextmanager
    def stream(self, elements: int, repeats: int = 1, gathered: int = 0) -> Iterator[Stream]:
        """Runs steps continuously while the body runs, and checks their results."""
        running = Stream(self, elements, repeats, gathered)
        try:
            yield running
        except BaseException:
            for rank in self.ranks:
                rank.kill()
            raise
        if not running.over:
            running.finish()


class Stream:
    """A running stream of steps. After the end, ``took`` has the duration of each step of rank 0,
    and ``longest_of`` the longest step of each rank, in ms.
    """

    def __init__(self, job: Job, elements: int, repeats: int, gathered: int) -> None:
        self._job = job
        self.over = False
        self.took: list[float] = []
        self.longest_of: list[float] = []
        job.shared.steps.value = job.shared.stop.value = 0
        job.ask("begin_stream", elements=elements, repeats=repeats, gathered=gathered)

    @property
    def steps(self) -> int:
        return int(self._job.shared.steps.value)

    def more(self, count: int) -> None:
        """Waits for `count` further steps."""
        target = self.steps + count
        deadline = time.monotonic() + PATIENCE_S
        while self.steps < target:
            if time.monotonic() >= deadline:
                over = [
                    f"rank {rank}"
                    for rank, events in enumerate(self._job.ask("events"))
                    if any(event["kind"] == "abort" for event in events)
                ]
                what = f"ended with an error at {' and '.join(over)}" if over else "hangs"
                pytest.fail(f"{what}, step {self.steps}: {self._job.states()}")
            time.sleep(0.01)

    def busiest(self) -> int:
        """Returns the rail with most of rank 0's bytes during the next 5 steps."""
        before = self._job.carried()
        self.more(5)
        after = self._job.carried()
        return max(range(len(after)), key=lambda rail: after[f"rail{rail}"] - before[f"rail{rail}"])

    def failures(self) -> list[dict[str, Any]]:
        """Waits until the stream ends by itself. Returns the error on each live rank."""
        self.over = True
        living = [rank for rank in self._job.ranks if rank.is_alive()]
        for rank in living:
            rank.begin("heard_end")
        return [rank.end() for rank in living]

    def finish(self) -> None:
        self.over = True
        self._job.shared.stop.value = 1
        took = self._job.ask("end_stream")
        self.took, self.longest_of = took[0], [max(of_rank) for of_rank in took]

    @property
    def median(self) -> float:
        return statistics.median(self.took)

    def longest(self, begin: int = 0, end: int | None = None) -> float:
        """Returns the longest step from number `begin` up to `end` (exclusive), in ms."""
        return max(self.took[begin:end])


def _serve(
    pipe: Connection, rank: int, world: int, port: int, config: dict[str, Any], shared: Shared
) -> None:
    torch.set_num_threads(1)
    try:
        communicator = Communicator.standalone(
            "127.0.0.1", port, rank, world, config=Config(**config), timeout_s=PATIENCE_S
        )
        worker = Worker(communicator, shared)
        pipe.send((True, None))
        while True:
            what, arguments = pipe.recv()
            if what == STOP:
                break
            pipe.send((True, getattr(worker, what)(**arguments)))
        communicator.close()
    except BaseException:  # noqa: BLE001 - the test gets any error
        pipe.send((False, traceback.format_exc()))
    os._exit(0)
