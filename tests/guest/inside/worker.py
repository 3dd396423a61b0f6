"""Work of a rank in a job inside the guest, on request of the test."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from r2serve.communicator import Communicator
from r2serve.errors import R2cclError

PATIENCE_S = 120.0
KINDS = [
    *("all_reduce", "all_gather", "reduce_scatter", "broadcast", "gather", "all_to_all"),
    *("send and recv", "barrier"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.int64]
ROWS = [1, 7, 300, 1024, 5000, 40_000]

FORK = multiprocessing.get_context("fork")


class Shared:
    """State of a stream, shared by the test and the ranks."""

    def __init__(self) -> None:
        self.steps = FORK.Value("Q", 0, lock=False)
        self.stop = FORK.Value("B", 0, lock=False)


class Worker:
    """Methods callable by the test; each runs in the rank's process."""

    def __init__(self, communicator: Communicator, shared: Shared) -> None:
        self._communicator = communicator
        self._shared = shared
        self._threads = ThreadPoolExecutor(1)
        self._took: Future[list[float]] = Future()
        self._ended = 0.0

    def rails(self) -> list[dict[str, Any]]:
        return [vars(rail) for rail in self._communicator.rails()]

    def events(self) -> list[dict[str, Any]]:
        return [vars(event) for event in self._communicator.events()]

    def inject(self, rail: int, fault: str) -> None:
        self._communicator.inject(rail, fault)

    def heard_end(self) -> dict[str, Any]:
        """Returns the typed error that ended the stream, and its time."""
        try:
            took = self._took.result(PATIENCE_S)
        except R2cclError as error:
            return {"error": type(error).__name__, "text": str(error), "at": self._ended}
        return {"error": None, "text": f"{len(took)} good steps", "at": self._ended}

    def begin_stream(self, elements: int, repeats: int, gathered: int) -> None:
        """Starts a stream: steps of `repeats` all-reduces and an optional all-gather, until the
        test ends it.
        """

        def run() -> list[float]:
            try:
                return self._stream(elements, repeats, gathered)
            finally:
                self._ended = time.monotonic()

        self._took = self._threads.submit(run)

    def end_stream(self) -> list[float]:
        """Returns the duration of each step, in ms."""
        return self._took.result(PATIENCE_S)

    def _stream(self, elements: int, repeats: int, gathered: int) -> list[float]:
        """Runs the steps. Element 0 marks the last step; the other elements are checked."""
        rank, world = self._communicator.rank, self._communicator.world_size
        expected = torch.arange(elements, dtype=torch.float32) * sum(range(1, world + 1))
        mine = torch.arange(elements, dtype=torch.float32) * (rank + 1)
        share = torch.arange(gathered, dtype=torch.float32)
        data = torch.empty(elements)
        took: list[float] = []
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
                assert torch.equal(data, expected), f"step {len(took)} has wrong elements"
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
        """Runs all-reduces from a registered tensor to a registered result; devices access both
        directly.
        """
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
        """Returns the durations of `count` all-reduces, in us, after as many warm-up calls."""
        data, took = torch.ones(elements), []
        for _ in range(2 * count):
            began = time.perf_counter_ns()
            self._communicator.all_reduce(data, "max", out=data)
            took.append((time.perf_counter_ns() - began) / 1e3)
        return took[count:]

    def random_calls(self, seed: int, count: int) -> Counter[str]:
        """Runs collectives of random kind, type and size, and compares with torch's own arithmetic.

        Values are small integers, so that all types represent the values and their sums exactly.
        """
        plan, done = random.Random(seed), Counter[str]()
        for number in range(count):
            kind, dtype = plan.choice(KINDS), plan.choice(DTYPES)
            rows, root = plan.choice(ROWS), plan.randrange(self._communicator.world_size)
            values = [
                torch.randint(
                    -99,
                    99,
                    (rows * self._communicator.world_size,),
                    generator=torch.Generator().manual_seed(hash((seed, number, rank)) % 2**31),
                ).to(dtype)
                for rank in range(self._communicator.world_size)
            ]
            got, wanted = self._call(kind, root, values)
            what = f"call {number} of seed {seed}: {kind} of {rows} rows of {dtype}"
            assert (got is None) == (wanted is None), what
            assert got is None or torch.equal(got, wanted), what
            done[kind] += 1
        return done

    def _call(self, kind: str, root: int, values: list[torch.Tensor]) -> tuple[Any, Any]:
        """Runs a single call. Returns its result on this rank, and the expected result."""
        communicator, rank = self._communicator, self._communicator.rank
        own, shares = values[rank].clone(), [value.view(len(values), -1) for value in values]
        peer = (rank + 1) % len(values)
        match kind:
            case "all_reduce":
                return communicator.all_reduce(own), sum(values)
            case "all_gather":
                return communicator.all_gather(own), torch.stack(values)
            case "reduce_scatter":
                return communicator.reduce_scatter(own), sum(share[rank] for share in shares)
            case "broadcast":
                return communicator.broadcast(own, root), values[root]
            case "gather":
                at_root = torch.stack(values) if rank == root else None
                return communicator.gather(own, root), at_root
            case "all_to_all":
                wanted = torch.cat([share[rank] for share in shares])
                return communicator.all_to_all(own), wanted
            case "send and recv":
                got = torch.empty_like(own)
                for sender in range(len(values)):
                    if sender == rank:
                        communicator.send(own, peer)
                    elif (sender + 1) % len(values) == rank:
                        communicator.recv(got, sender)
                return got, values[rank - 1]
            case _:
                communicator.barrier()
                return None, None
