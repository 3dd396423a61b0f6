"""Times on the device: medians over replayed CUDA graphs, without Python's launch overhead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from r2serve.bench.collectives.statistics import median
from r2serve.kernels.jit import jit

CALLS_A_GRAPH = 20  # the events around a replay cost about 1 us, spread over 20 calls
REPLAYS = 51
WARM_UPS = 3
COPY_BYTES = 2**29  # much larger than any cache


class Timer(Protocol):
    def median_us(self, call: Callable[[], Any]) -> float: ...


class GraphTimer:
    """Measures a call by replays of a graph with CALLS_A_GRAPH copies of the call.

    A sample is the time of a replay, divided by the number of calls. The calls of a graph run
    without gaps on the same memory. Data smaller than the L2 cache therefore stays in the cache;
    this holds for every contender alike.
    """

    def median_us(self, call: Callable[[], Any]) -> float:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compile, and allocate memory for reuse by the capture
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
    """Returns a copy of ``size`` bytes as a call, and the bytes moved (read and written)."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * size
