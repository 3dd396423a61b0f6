"""A worker of the peers that are called from Python: r2ccl, torch gloo and MPTCP.

Speaks the protocol of ``native/worker.hpp`` and measures by the same loop: back-to-back calls, one
clock reading between two. Two more commands serve the measurement of stalls:

    soak <ms>   all-reduces for that long -> `soak <start ns> <ns> <ns> ...`: when the first one
                started (CLOCK_MONOTONIC) and the time of each
    rails       -> `rails <name>,<state>,<bytes sent> ...` (r2ccl: those that carry collectives;
                MPTCP: the devices)

    python -m r2serve.bench.collectives.worker IMPL CONTROL_SOCKET RANK RANKS STORE
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Protocol

import torch

from r2serve.bench.collectives.mptcp import Mptcp

Once = Callable[[], object]


class Peer(Protocol):
    def bind(self, op: str, algorithm: str, data: torch.Tensor, output: torch.Tensor) -> Once:
        """The collective as a call without arguments; in place where the op allows it."""

    def rails(self) -> list[str]:
        """Name, state and bytes sent of each rail; empty for a peer that has none."""

    def close(self) -> None: ...


class R2ccl:
    def __init__(self, rank: int, ranks: int, store: str) -> None:
        from r2serve.communicator import Communicator

        host, _, port = store.rpartition(":")
        self._communicator = Communicator.standalone(host, int(port), rank, ranks, name="bench")

    def bind(self, op: str, algorithm: str, data: torch.Tensor, output: torch.Tensor) -> Once:
        communicator = self._communicator
        chosen = None if algorithm == "auto" else algorithm
        calls: dict[str, Once] = {
            "all_reduce": lambda: communicator.all_reduce(data, out=data, algorithm=chosen),
            "all_gather": lambda: communicator.all_gather(data, out=output),
            "reduce_scatter": lambda: communicator.reduce_scatter(data, out=output),
            "broadcast": lambda: communicator.broadcast(data, 0),
        }
        if chosen is not None and op != "all_reduce":
            raise ValueError(f"{op} has one algorithm only")
        return calls[op]

    def rails(self) -> list[str]:
        rails = [r for r in self._communicator.rails() if r.kind == "tcp"]
        return [f"{r.name},{r.state},{r.data_tx_bytes}" for r in rails]

    def close(self) -> None:
        self._communicator.close()


class Gloo:
    def __init__(self, rank: int, ranks: int, store: str) -> None:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks
        )

    def bind(self, op: str, algorithm: str, data: torch.Tensor, output: torch.Tensor) -> Once:
        flat = output.reshape(-1)
        calls: dict[str, Once] = {
            "all_reduce": lambda: torch.distributed.all_reduce(data),
            "all_gather": lambda: torch.distributed.all_gather_into_tensor(flat, data),
            "reduce_scatter": lambda: torch.distributed.reduce_scatter_tensor(flat, data),
            "broadcast": lambda: torch.distributed.broadcast(data, 0),
        }
        return calls[op]

    def rails(self) -> list[str]:
        return []

    def close(self) -> None:
        torch.distributed.destroy_process_group()


PEERS: dict[str, Callable[[int, int, str], Peer]] = {"r2ccl": R2ccl, "gloo": Gloo, "mptcp": Mptcp}


class Worker:
    """The current collective of a rank and its buffers."""

    def __init__(self, peer: Peer, rank: int, ranks: int) -> None:
        self._peer = peer
        self._rank = rank
        self._ranks = ranks
        self._once: Once | None = None
        self._data = torch.empty(0)

    def answer(self, line: str) -> str:
        try:
            match line.split():
                case ["prepare", op, dtype, size, algorithm]:
                    return self._prepare(op, getattr(torch, dtype), int(size), algorithm)
                case ["run", warmup, iterations] if self._once is not None:
                    times = timed(self._once, int(warmup), int(iterations))
                    return " ".join(["times", *map(str, times)])
                case ["soak", duration_ms] if self._once is not None:
                    times = soak(self._once, self._data, self._rank, int(duration_ms))
                    return " ".join(["soak", *map(str, times)])
                case ["rails"]:
                    return " ".join(["rails", *self._peer.rails()])
        except (RuntimeError, ValueError) as error:
            return "error " + " ".join(f"{type(error).__name__}: {error}".split())
        return f"error not understood: {line}"

    def _prepare(self, op: str, dtype: torch.dtype, size: int, algorithm: str) -> str:
        count = size // dtype.itemsize
        data = pattern(count, self._rank).to(dtype)
        shape = (self._ranks, count) if op == "all_gather" else (count // self._ranks,)
        output = torch.empty(shape, dtype=dtype)
        self._once = self._peer.bind(op, algorithm, data, output)
        self._once()
        result = output if op in ("all_gather", "reduce_scatter") else data
        if not torch.equal(result, self._expected(op, count).to(dtype)):
            return "error wrong result"
        data.fill_(0)  # sums stay finite however long it runs
        self._data = data
        return "ok"

    def _expected(self, op: str, count: int) -> torch.Tensor:
        total = pattern(count, 0) * (self._ranks * (self._ranks + 1) // 2)
        match op:
            case "all_reduce":
                return total
            case "all_gather":
                return torch.stack([pattern(count, rank) for rank in range(self._ranks)])
            case "reduce_scatter":
                return total.chunk(self._ranks)[self._rank]
            case "broadcast":
                return pattern(count, 0)
        raise ValueError(f"unknown op {op}")


def pattern(count: int, rank: int) -> torch.Tensor:
    """Small whole numbers, so that sums over a few ranks are exact in every dtype."""
    return (torch.arange(count, dtype=torch.int32) % 13 + 1) * (rank + 1)


def timed(once: Once, warmup: int, iterations: int) -> list[int]:
    clock = time.perf_counter_ns
    times = [0] * iterations
    for _ in range(warmup):
        once()
    before = clock()
    for i in range(iterations):
        once()
        after = clock()
        times[i] = after - before
        before = after
    return times


def soak(once: Once, data: torch.Tensor, rank: int, duration_ms: int) -> list[int]:
    """The first start and the time of each all-reduce; all ranks stop after the same one.

    Rank 0 says when it is enough by a 1 in the first element, which the sum brings to every rank.
    """
    clock = time.perf_counter_ns
    first = data.numpy()
    before = clock()
    times = [before]
    deadline = before + duration_ms * 1_000_000
    while first[0] == 0:
        if rank == 0 and before >= deadline:
            first[0] = 1
        once()
        after = clock()
        times.append(after - before)
        before = after
    first[0] = 0
    return times


def pin_rank(rank: int) -> None:
    """Rank r on the r-th core that this process may use, modulo their number; all its threads."""
    cores = sorted(os.sched_getaffinity(0))
    for thread in os.listdir("/proc/self/task"):  # later threads inherit it from their starter
        os.sched_setaffinity(int(thread), {cores[rank % len(cores)]})


def main(arguments: list[str]) -> int:
    impl, control, rank_text, ranks_text, store = arguments
    rank, ranks = int(rank_text), int(ranks_text)
    torch.set_num_threads(1)
    peer = PEERS[impl](rank, ranks, store)
    worker = Worker(peer, rank, ranks)
    gc.disable()  # a collection would land in some call's time
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(control)
        with connection.makefile("rw", encoding="ascii", newline="\n") as channel:
            channel.write(f"hello {rank}\n")
            channel.flush()
            for line in channel:
                if line == "quit\n":
                    break
                channel.write(worker.answer(line) + "\n")
                channel.flush()
    peer.close()
    return 0


if __name__ == "__main__":
    pin_rank(int(sys.argv[3]))
    sys.exit(main(sys.argv[1:]))
