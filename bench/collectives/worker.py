"""A worker of the contenders called from Python: r2ccl, torch gloo and MPTCP.

The worker uses the protocol of ``native/worker.hpp`` and the same timed loop: back-to-back calls
with a single clock reading between two calls. Commands of this worker:

    soak <ms>   all-reduces for <ms> milliseconds -> `soak <start ns> <ns> <ns> ...`: start of the
                first call (CLOCK_MONOTONIC), then the time of each call
    rails       -> `rails <name>,<state>,<bytes sent> ...` (r2ccl: TCP rails; MPTCP: network
                devices)
    fault <rail> <kind> <bytes/s>   injects a fault into a rail of this rank -> `ok`

    python -m r2serve.bench.collectives.worker IMPL CONTROL_SOCKET RANK RANKS STORE

The thread of the calls is pinned to a CPU, as in vLLM's workers on CPUs, after the import of
r2serve. With the variable ``contenders.COMPUTE`` it also computes before each all-reduce of
``soak``, as a model's layers do; the time of a call then includes the computation.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import time

import torch

from r2serve.bench.collectives.contenders import COMPUTE
from r2serve.bench.collectives.operations import buffers
from r2serve.bench.collectives.python_contenders import CONTENDERS, Once, PythonContender


class RankWorker:
    """The current collective of a rank, with buffers."""

    def __init__(self, contender: PythonContender, rank: int, ranks: int) -> None:
        self._contender = contender
        self._rank = rank
        self._ranks = ranks
        self._once: Once | None = None
        self._data = torch.empty(0)
        self._compute_ns = int(os.environ.get(COMPUTE, "0")) * 1000

    def answer(self, line: str) -> str:
        try:
            match line.split():
                case ["prepare", op, dtype, size, algorithm]:
                    return self._prepare(op, getattr(torch, dtype), int(size), algorithm)
                case ["run", warmup, iterations] if self._once is not None:
                    cpu, times = timed(self._once, int(warmup), int(iterations))
                    return " ".join(["times", str(cpu), *map(str, times)])
                case ["soak", duration_ms] if self._once is not None:
                    once = self._once if not self._compute_ns else self._computing(self._once)
                    times = soak(once, self._data, self._rank, int(duration_ms))
                    return " ".join(["soak", *map(str, times)])
                case ["rails"]:
                    return " ".join(["rails", *self._contender.rails()])
                case ["fault", rail, kind, bytes_per_s]:
                    self._contender.fault(int(rail), kind, float(bytes_per_s))
                    return "ok"
        except (RuntimeError, ValueError) as error:
            return "error " + " ".join(f"{type(error).__name__}: {error}".split())
        return f"error not understood: {line}"

    def _computing(self, once: Once) -> Once:
        def compute_and_call() -> None:
            compute(self._compute_ns)
            once()

        return compute_and_call

    def _prepare(self, op: str, dtype: torch.dtype, size: int, algorithm: str) -> str:
        of = buffers(op, dtype, size // dtype.itemsize, self._rank, self._ranks)
        self._once = None
        once = self._contender.bind(op, algorithm, of.data, of.output)
        once()
        if (
            of.result is not None
            and of.expected is not None
            and not torch.equal(of.result, of.expected)
        ):
            return f"wrong {_difference(of.result, of.expected)}"
        of.data.fill_(0)  # sums of zeros stay finite
        self._once, self._data = once, of.data
        return "ok"


def _difference(result: torch.Tensor, expected: torch.Tensor) -> str:
    wrong = torch.nonzero(result != expected).flatten()
    first, last = int(wrong[0]), int(wrong[-1])
    return (
        f"result: {len(wrong)} of {len(result)} elements, from {first} to {last}; the first is "
        f"{result[first].item()}, not {expected[first].item()}"
    )


def timed(once: Once, warmup: int, iterations: int) -> tuple[int, list[int]]:
    """Returns the CPU time of this process (all threads) and the time of each call, in ns."""
    clock = time.perf_counter_ns
    times = [0] * iterations
    for _ in range(warmup):
        once()
    cpu = time.process_time_ns()
    before = clock()
    for i in range(iterations):
        once()
        after = clock()
        times[i] = after - before
        before = after
    return time.process_time_ns() - cpu, times


def soak(once: Once, data: torch.Tensor, rank: int, duration_ms: int) -> list[int]:
    """Returns the start of the first all-reduce, then the time of each all-reduce, in ns.

    All ranks stop after the same call: rank 0 puts a 1 into the first element after the deadline,
    and the sum carries the 1 to every rank.
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


def compute(duration_ns: int) -> None:
    """Keeps the CPU of this thread busy, without Python's lock for most of the time."""
    weights = torch.ones(128, 128)
    until = time.perf_counter_ns() + duration_ns
    while time.perf_counter_ns() < until:
        torch.mm(weights, weights)


def pin_rank(rank: int) -> None:
    """Pins all threads of rank r to the r-th allowed core, modulo the number of cores."""
    cores = sorted(os.sched_getaffinity(0))
    for thread in os.listdir("/proc/self/task"):  # later threads inherit the affinity
        os.sched_setaffinity(int(thread), {cores[rank % len(cores)]})


def main(arguments: list[str]) -> int:
    impl, control, rank_text, ranks_text, store = arguments
    rank, ranks = int(rank_text), int(ranks_text)
    torch.set_num_threads(1)
    contender = CONTENDERS[impl](rank, ranks, store)
    worker = RankWorker(contender, rank, ranks)
    gc.disable()  # a garbage collection would add to the time of a call
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
    contender.close()
    return 0


if __name__ == "__main__":
    pin_rank(int(sys.argv[3]))
    sys.exit(main(sys.argv[1:]))
