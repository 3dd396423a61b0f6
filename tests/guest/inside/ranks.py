"""Ranks of a job inside the guest: forks of one process that has torch, which takes the guest a
minute to load (see conftest.py)."""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from r2serve import Config
from r2serve.communicator import Communicator

SLOW = 10
"""The guest is so many times slower than a machine: time-outs are so much longer."""
PATIENCE_S = 120.0
STOP = "stop"

_FORK = multiprocessing.get_context("fork")


class Shared:
    """What test and ranks both see of a stream."""

    def __init__(self) -> None:
        self.steps = _FORK.Value("Q", 0, lock=False)
        self.stop = _FORK.Value("B", 0, lock=False)


class Worker:
    """What a rank can be asked for; runs in the rank."""

    def __init__(self, communicator: Communicator, shared: Shared) -> None:
        self._communicator = communicator
        self._shared = shared
        self._threads = ThreadPoolExecutor(1)
        self._took: Future[list[float]] = Future()

    def rails(self) -> list[dict[str, Any]]:
        return [vars(rail) for rail in self._communicator.rails()]

    def events(self) -> list[dict[str, Any]]:
        return [vars(event) for event in self._communicator.events()]

    def inject(self, rail: int, fault: str) -> None:
        self._communicator.inject(rail, fault)

    def begin_stream(self, elements: int, repeats: int, gathered: int) -> None:
        """Steps of so many all-reduces, and an all-gather perhaps, until the test says stop."""
        self._took = self._threads.submit(self._stream, elements, repeats, gathered)

    def end_stream(self) -> list[float]:
        """How long each took, in ms."""
        return self._took.result(PATIENCE_S)

    def _stream(self, elements: int, repeats: int, gathered: int) -> list[float]:
        """Element 0 tells that it is the last one; the others are known and checked."""
        rank, world = self._communicator.rank, self._communicator.world_size
        expected = torch.arange(elements, dtype=torch.float32) * sum(range(1, world + 1))
        mine = torch.arange(elements, dtype=torch.float32) * (rank + 1)
        share = torch.arange(gathered, dtype=torch.float32)
        data, took = torch.empty(elements), []
        while True:
            stop = self._shared.stop.value if rank == 0 else 0
            time_ns, last = 0, False
            for _ in range(repeats):
                data.copy_(mine)
                data[0] = stop
                began = time.perf_counter_ns()
                self._communicator.all_reduce(data, out=data)
                time_ns += time.perf_counter_ns() - began
                last, data[0] = bool(data[0]), 0
                assert torch.equal(data, expected), f"step {len(took)} has other bits"
            if gathered:
                began = time.perf_counter_ns()
                shares = self._communicator.all_gather(share + rank)
                time_ns += time.perf_counter_ns() - began
                assert all(torch.equal(shares[r], share + r) for r in range(world))
            took.append(time_ns / 1e6)
            if rank == 0:
                self._shared.steps.value += 1
            if last:
                return took

    def registered(self, elements: int, count: int) -> None:
        """All-reduces of a tensor that the devices read where it lies, into one that they write."""
        rank, world = self._communicator.rank, self._communicator.world_size
        data, result = torch.empty(elements), torch.empty(elements)
        for tensor in (data, result):
            self._communicator.register_buffer(tensor)
        for number in range(count):
            data.fill_(rank + number)
            self._communicator.all_reduce(data, out=result)
            assert torch.all(result == sum(range(world)) + world * number)
        for tensor in (data, result):
            self._communicator.deregister_buffer(tensor)

    def times(self, elements: int, count: int) -> list[float]:
        """How long each of so many all-reduces takes, in us, after as many others."""
        data, took = torch.ones(elements), []
        for _ in range(2 * count):
            began = time.perf_counter_ns()
            self._communicator.all_reduce(data, "max", out=data)
            took.append((time.perf_counter_ns() - began) / 1e3)
        return took[count:]

    def random_calls(self, seed: int, count: int) -> int:
        """Collectives of random kind and size, against torch's own arithmetic on integers."""
        plan, world = random.Random(seed), self._communicator.world_size
        rank = self._communicator.rank
        for number in range(count):
            kind = plan.choice(["all_reduce", "all_gather", "broadcast", "all_to_all", "barrier"])
            rows = plan.choice([1, 7, 300, 1024, 5000, 40_000])
            root = plan.randrange(world)
            values = [
                torch.randint(-99, 99, (rows * world,), generator=_generator(seed, number, r))
                for r in range(world)
            ]
            own = values[rank].clone()
            if kind == "all_reduce":
                got, wanted = self._communicator.all_reduce(own), sum(values)
            elif kind == "all_gather":
                got, wanted = self._communicator.all_gather(own), torch.stack(values)
            elif kind == "broadcast":
                got, wanted = self._communicator.broadcast(own, root), values[root]
            elif kind == "all_to_all":
                got = self._communicator.all_to_all(own)
                wanted = torch.cat([value.view(world, -1)[rank] for value in values])
            else:
                self._communicator.barrier()
                continue
            assert torch.equal(got, wanted), f"call {number} of seed {seed}: {kind} of {rows} rows"
        return count


def _generator(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(numbers) % 2**31)


class Rank:
    """One rank, in a process of its own."""

    def __init__(
        self, number: int, world: int, port: int, config: dict[str, Any], shared: Shared
    ) -> None:
        self.number = number
        self._pipe, theirs = _FORK.Pipe()
        self._process = _FORK.Process(
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
        """Closes the communicator in order; wait_stopped() follows."""
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


class Job:
    """The ranks of a job, each of them a node."""

    def __init__(
        self, world: int = 2, rails_of: Callable[[int], str] | None = None, **config: Any
    ) -> None:
        """rails_of: a rank's ``R2CCL_RAILS``; by default its two first NICs."""
        self.shared = Shared()
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
            "verbs_timeout": 17,  # eight times as long
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
        """The answers of all ranks, which work at the same time."""
        for rank in self.ranks:
            rank.begin(what, **arguments)
        return [rank.end() for rank in self.ranks]

    def rail(self, number: int, rank: int = 0) -> dict[str, Any]:
        return dict(self.ranks[rank].ask("rails")[number])

    def states(self) -> list[list[str]]:
        return [[f"{r['name']} {r['state']}" for r in rails] for rails in self.ask("rails")]

    def await_left(self, rail: int) -> None:
        """Both ends have given it up; it may have come back since."""
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
            lambda: all(rail["state"] == "UP" for rails in self.ask("rails") for rail in rails),
        )

    def eventually(self, what: str, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, f"{what}: not within {PATIENCE_S:g} s"
            time.sleep(0.05)

    def moves(self, since_ns: int = 0, to: str = "DOWN") -> list[tuple[int, str, str]]:
        """Rank, rail and cause of every move of a rail to a state, by the journals."""
        return [
            (rank, event["rail"].split("@")[0], event["text"].partition(" ")[2])
            for rank, events in enumerate(self.ask("events"))
            for event in events
            if f"->{to}" in event["text"] and event["time_ns"] >= since_ns
        ]

    def carried(self, rank: int = 0) -> dict[str, int]:
        """Data that each verbs rail has sent, in bytes."""
        return {
            rail["name"].split("@")[0]: rail["data_tx_bytes"]
            for rail in self.ranks[rank].ask("rails")
            if rail["kind"] == "verbs"
        }

    @contextmanager
    def stream(self, elements: int, repeats: int = 1, gathered: int = 0) -> Iterator[Stream]:
        """Steps without end while the body runs, whose results are checked."""
        running = Stream(self, elements, repeats, gathered)
        try:
            yield running
        except BaseException:
            for rank in self.ranks:
                rank.kill()
            raise
        running.finish()


class Stream:
    """Its ``took`` is there when it is over: how long rank 0's steps took, in ms."""

    def __init__(self, job: Job, elements: int, repeats: int, gathered: int) -> None:
        self._job = job
        self.took: list[float] = []
        job.shared.steps.value = job.shared.stop.value = 0
        job.ask("begin_stream", elements=elements, repeats=repeats, gathered=gathered)

    @property
    def steps(self) -> int:
        return int(self._job.shared.steps.value)

    def more(self, count: int) -> None:
        """Let so many further steps pass."""
        target = self.steps + count
        deadline = time.monotonic() + PATIENCE_S
        while self.steps < target:
            assert time.monotonic() < deadline, f"hangs at step {self.steps}: {self._job.states()}"
            time.sleep(0.01)

    def finish(self) -> None:
        self._job.shared.stop.value = 1
        self.took = self._job.ask("end_stream")[0]

    @property
    def median(self) -> float:
        return statistics.median(self.took)

    def longest(self, begin: int = 0, end: int | None = None) -> float:
        """Of the calls from the `begin`-th to the one before the `end`-th."""
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
    except BaseException:  # noqa: BLE001 - whatever it is, the test is told
        pipe.send((False, traceback.format_exc()))
    os._exit(0)
