"""Times on the device: medians of replayed CUDA graphs, so that Python's launches do not count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from r2serve.bench.collectives.statistics import median
from r2serve.kernels.jit import jit

CALLS_A_GRAPH = 20  # the events around a replay cost about a microsecond: 1/20 of it a call
REPLAYS = 51
WARM_UPS = 3
COPY_BYTES = 2**29  # far beyond any cache


class Timer(Protocol):
    def median_us(self, call: Callable[[], Any]) -> float: ...


class GraphTimer:
    """Each graph holds a call several times over; a sample is the time of a replay by its calls.

    Calls of one graph follow each other without a gap and on the same memory: what fits into the
    L2 cache is found there, for every contender alike.
    """

    def median_us(self, call: Callable[[], Any]) -> float:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles, and makes allocations that capture may reuse
            for _ in range(WARM_UPS):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS_A_GRAPH):
                call()
        graph.replay()
        samples = []
        for _ in range(REPLAYS):
            begin = _event()
            end = _event()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) * 1e3 / CALLS_A_GRAPH)
        return median(samples)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@jit
def _empty_kernel() -> None:
    return


def empty() -> None:
    _empty_kernel[(1,)](num_warps=1)


def copy_call(device: torch.device, size: int = COPY_BYTES) -> tuple[Callable[[], Any], int]:
    """A copy, and the bytes that it moves: each is read and written."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * size
