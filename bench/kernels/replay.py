"""All-reduces in replayed CUDA graphs: two ranks share a GPU and use loopback rails.

The benchmark compares the graph's all-reduce with the host's all-reduce of the same size.  The
benchmark also measures the stall of a replay when a rail is lost, and the speed of later replays.
All times are measured by rank 0 in a single run.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from r2serve.bench.collectives.statistics import median, percentile
from r2serve.communicator import Communicator
from r2serve.config import Config
from r2serve.device import DeviceCommunicator

RANKS = 2
RAILS = ("127.0.0.1", "127.0.0.2")
BYTES = 16 * 1024
CALLS_A_GRAPH = 10  # the launch of a replay and the final wait are spread over 10 calls
ABOVE_HOST_US = 25.0
AFTER_RATIO = 1.05
HIT_WITHIN_S = 0.3
AFTER = 20  # replays measured after the affected replay; also replays between two checks
REJOIN_TIMEOUT_S = 10.0


class Graph(Protocol):
    def replay(self) -> None: ...

    def synchronise(self) -> None: ...


Capture = Callable[[DeviceCommunicator, Callable[[], None]], Graph]


@dataclass(frozen=True)
class ReplayRow:
    """Times of calls in us, and of stalls in ms.

    ``after_ratio`` is the time after a fault divided by the time on a single healthy rail.
    """

    bytes: int
    host_us: float
    replay_us: float
    one_rail_us: float
    faults: int
    stall_p50_ms: float
    stall_p99_ms: float
    after_ratio: float

    @property
    def above_host_us(self) -> float:
        return self.replay_us - self.host_us

    def as_json(self) -> dict[str, Any]:
        return {
            "kernel": "all_reduce under graph replay",
            **asdict(self),
            "above_host_us": self.above_host_us,
            "reached": {
                "above_host_us": self.above_host_us <= ABOVE_HOST_US,
                "after_ratio": self.after_ratio <= AFTER_RATIO,
            },
        }


# Lock held by each capture of this process.  torch synchronises the device when a capture begins;
# the synchronisation breaks a capture of another thread in any capture mode.
ONE_CAPTURE = threading.Lock()


class _GpuGraph:
    def __init__(self, body: Callable[[], None]) -> None:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        with (
            ONE_CAPTURE,
            torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
        ):
            body()
        self.replay = graph.replay
        self.synchronise = torch.cuda.current_stream().synchronize


def capture_on_gpu(_: DeviceCommunicator, body: Callable[[], None]) -> Graph:
    """Captures ``body`` in torch's current stream, a separate stream for each rank's thread."""
    return _GpuGraph(body)


CallTimes = list[tuple[int, int]]
"""Begin and end of each replay, in ns."""


class _Ranks:
    """Two ranks, each with a separate thread, stream and graph."""

    def __init__(
        self, pair: list[DeviceCommunicator], device: torch.device, pool: ThreadPoolExecutor
    ) -> None:
        self._pair = pair
        self._device = device
        self._pool = pool
        on_gpu = device.type == "cuda"
        self._streams: list[Any] = [
            torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]
            for _ in range(RANKS)
        ]
        self._data = [torch.zeros(BYTES // 4, device=device) for _ in range(RANKS)]
        self._graphs: list[Graph] = []
        self._ready = threading.Barrier(RANKS)
        self._over = False

    def _all(self, call: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Starts ``call`` on every rank's thread and stream; returns the futures."""

        def in_stream(rank: int) -> Any:
            stream = self._streams[rank]
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                return call(rank, *arguments)

        return [self._pool.submit(in_stream, rank) for rank in range(RANKS)]

    def host_us(self, calls: int) -> float:
        """Returns the median time of the host's all-reduce of BYTES, in us."""

        def times_of(rank: int) -> list[int]:
            host, data = self._pair[rank].host, torch.ones(BYTES // 4)
            times = []
            for _ in range(calls):
                began = time.perf_counter_ns()
                host.all_reduce(data, out=data)
                times.append(time.perf_counter_ns() - began)
            return times

        of_rank_0, *_ = [each.result(120) for each in self._all(times_of)]
        return median(of_rank_0) / 1e3

    def capture(self, capture: Capture) -> None:
        def of(rank: int) -> Graph:
            def body() -> None:
                for _ in range(CALLS_A_GRAPH):
                    self._pair[rank].all_reduce(self._data[rank], out=self._data[rank])

            return capture(self._pair[rank], body)

        self._graphs = [each.result(120) for each in self._all(of)]

    def replay(self, enough: Callable[[int], bool], meanwhile: Callable[[], int]) -> CallTimes:
        """Replays the graphs until ``enough(number of replays)``; returns the times of rank 0.

        ``meanwhile`` runs in the calling thread.
        """
        times: CallTimes = []
        running = self._all(self._replay, enough, times)
        meanwhile()
        for each in running:
            each.result(120)
        return times

    def _replay(self, rank: int, enough: Callable[[int], bool], times: CallTimes) -> None:
        while True:
            self._ready.wait(60)
            if rank == 0:
                self._over = enough(len(times))
            self._ready.wait(60)
            if self._over:
                return
            for _ in range(AFTER):  # the same number of replays on every rank
                began = time.perf_counter_ns()
                self._graphs[rank].replay()
                self._graphs[rank].synchronise()
                if rank == 0:
                    times.append((began, time.perf_counter_ns()))
            self._pair[rank].check()

    def strike(self, rail: int) -> tuple[CallTimes, int]:
        """Replays while the rail is lost; returns the times and the time of the loss, in ns.

        The rail stays lost afterwards.
        """
        struck: list[int] = []

        def cut() -> int:
            time.sleep(0.05)
            at = time.perf_counter_ns()
            self._pair[0].inject(rail, "carrier_loss")
            time.sleep(HIT_WITHIN_S)
            struck.append(at)
            return at

        times = self.replay(lambda _: bool(struck), cut)
        return times, struck[0]


def measure(
    library: str, device: torch.device, capture: Capture, *, calls: int = 500, faults: int = 20
) -> ReplayRow:
    """Measures a row.

    Args:
        library: the CUDA driver.
        calls: number of calls or replays for each median.
        faults: number of rail losses.
    """
    with _pair(library, device) as pair, ThreadPoolExecutor(RANKS) as pool:
        ranks = _Ranks(pair, device, pool)
        host_us = ranks.host_us(calls)
        ranks.capture(capture)
        healthy = ranks.replay(lambda count: count >= calls, lambda: 0)
        pair[0].inject(0, "carrier_loss")
        one_rail = ranks.replay(lambda count: count >= calls, lambda: 0)
        _heal(pair[0], 0)
        stalls: list[float] = []
        afters: CallTimes = []
        for turn in range(faults):
            rail = turn % len(RAILS)
            hit, after = _hit(*ranks.strike(rail))
            stalls.append((hit[1] - hit[0]) / 1e6)
            afters += after
            _heal(pair[0], rail)
        one_rail_us = _call_us(one_rail[AFTER:])
        return ReplayRow(
            bytes=BYTES,
            host_us=host_us,
            replay_us=_call_us(healthy[AFTER:]),
            one_rail_us=one_rail_us,
            faults=faults,
            stall_p50_ms=median(stalls),
            stall_p99_ms=percentile(stalls, 99),
            after_ratio=_call_us(afters) / one_rail_us,
        )


def _call_us(times: CallTimes) -> float:
    return median([end - begin for begin, end in times]) / 1e3 / CALLS_A_GRAPH


def _hit(times: CallTimes, at: int) -> tuple[tuple[int, int], CallTimes]:
    """Returns the longest replay with an end after ``at``, and up to AFTER later replays."""
    later = [index for index, (_, end) in enumerate(times) if end > at]
    longest = max(later, key=lambda index: times[index][1] - times[index][0])
    after = times[longest + 1 : longest + 1 + AFTER]
    return times[longest], after or [times[-1]]


def _heal(communicator: DeviceCommunicator, rail: int) -> None:
    communicator.inject(rail, "heal")
    deadline = time.monotonic() + REJOIN_TIMEOUT_S
    while any(one.state != "UP" for one in communicator.rails() if one.kind == "tcp"):
        if time.monotonic() > deadline:
            raise TimeoutError(f"rail {rail} is not UP {REJOIN_TIMEOUT_S:g} s after healing")
        time.sleep(0.005)


@contextmanager
def _pair(library: str, device: torch.device) -> Iterator[list[DeviceCommunicator]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def make(rank: int) -> DeviceCommunicator:
        config = Config(
            rails=",".join(RAILS),
            node=f"n{rank}",
            cuda_library=library,
            gpu_staging_bytes=1024**2,
            rejoin_backoff_min_ms=1,
            flap_half_life_s=0.0,
        )
        host = Communicator.standalone(
            "127.0.0.1", port, rank, RANKS, name="replay", config=config, share_engine=False
        )
        return DeviceCommunicator(host, device)

    with ThreadPoolExecutor(RANKS) as pool:
        pair = list(pool.map(make, range(RANKS)))
        try:
            yield pair
        finally:
            list(pool.map(DeviceCommunicator.close, pair))
