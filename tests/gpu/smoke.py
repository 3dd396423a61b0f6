"""Runs the first collectives on a GPU, smallest first; every output line is JSON.

    python3 tests/gpu/smoke.py pair    2 ranks, threads of this process: no time slicing
    python3 tests/gpu/smoke.py node    2 nodes of 2 ranks, 4 processes: CUDA IPC, exchange

Both also run on the fake driver (`--library`). Steps that need a GPU then print `"skipped": "no
GPU"`. After `--limit-s` seconds the process writes a traceback of each thread and ends. Exit status
0: all results equal the host's results bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from r2serve.bench.kernels.replay import Graph, capture_on_gpu
from r2serve.communicator import Communicator
from r2serve.config import Config
from r2serve.device import DeviceCommunicator

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
SKIPPED = {"skipped": "no GPU"}
STAGING_BYTES = 1 << 20
NODES, RANKS_A_NODE = 2, 2
LATENCY_BYTES = (4096, 16384, 65536, 131072, 1 << 20)
CALLS_A_GRAPH, REPLAYS = 10, 100
CUT_AT, HEAL_AT = 40, 60  # replays
RANKS_EARLIER_S = 20.0

Call = Callable[[Any, torch.Tensor], torch.Tensor]
CALLS: dict[str, Call] = {
    "all_reduce": lambda c, x: c.all_reduce(x),
    "max": lambda c, x: c.all_reduce(x, "max"),
    "all_gather": lambda c, x: c.all_gather(x),
    "reduce_scatter": lambda c, x: c.reduce_scatter(x),
}


class Report:
    """Prints lines and records whether all results were right."""

    def __init__(self) -> None:
        self.right = True

    def line(self, step: str, *, right: bool = True, **more: Any) -> None:
        self.right = self.right and right
        said = {"unix_s": round(time.time(), 3), "step": step, "right": right, **more}
        # A single write call, because 4 processes share the file.
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()

    def skip(self, step: str) -> None:
        self.line(step, **SKIPPED)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make(library: str, rank: int, size: int, port: int, node: str) -> DeviceCommunicator:
    config = Config(
        rails="127.0.0.1,127.0.0.2",
        node=node,
        cuda_library=library,
        gpu_staging_bytes=STAGING_BYTES,
        rejoin_backoff_min_ms=1,
        flap_half_life_s=0.0,
    )
    host = Communicator.standalone(
        "127.0.0.1", port, rank, size, name="smoke", config=config, share_engine=False
    )
    return DeviceCommunicator(host, DEVICE)


def settle() -> None:
    if ON_GPU:
        torch.cuda.current_stream().synchronize()


def values(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)


def compare(
    communicator: DeviceCommunicator, rank: int, count: int, dtype: torch.dtype
) -> dict[str, bool]:
    """Returns, by collective, whether the result equals the host's result bit for bit."""
    source, same = values(rank, count, dtype), {}
    for name, call in CALLS.items():
        got = call(communicator, source.to(DEVICE))
        settle()
        communicator.check()
        same[name] = torch.equal(got.cpu(), call(communicator.host, source))
    return same


class Pair:
    """Two ranks of this process, each with a thread and a stream."""

    def __init__(self, library: str, limit_s: float, report: Report) -> None:
        self.report = report
        self.limit_s = limit_s
        self.pool = ThreadPoolExecutor(2)
        self.streams: list[Any] = [torch.cuda.Stream() if ON_GPU else None for _ in range(2)]
        port = free_port()
        self.ranks = self.both(lambda rank: make(library, rank, 2, port, f"n{rank}"))
        report.line("made", staged=self.ranks[0]._stream_core.direct() or "GPU memory")

    def both(self, call: Callable[[int], Any]) -> list[Any]:
        def in_stream(rank: int) -> Any:
            stream = self.streams[rank]
            with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                return call(rank)

        started = [self.pool.submit(in_stream, rank) for rank in range(2)]
        return [each.result(self.limit_s) for each in started]

    def eager(self, step: str, count: int, dtype: torch.dtype) -> None:
        began = time.monotonic()
        same = self.both(lambda rank: compare(self.ranks[rank], rank, count, dtype))
        right = all(all(each.values()) for each in same)
        seconds = round(time.monotonic() - began, 3)
        self.report.line(step, right=right, elements=count, same=same, seconds=seconds)

    def cut_rail(self) -> None:
        self.ranks[0].inject(0, "carrier_loss")
        self.eager("cut rail", 1 << 16, torch.float32)
        self.ranks[0].inject(0, "heal")
        events = [each.text for each in self.ranks[0].events()]
        self.report.line("down", right=any("->DOWN" in text for text in events))

    def graph(self, size_bytes: int) -> None:
        """Times a call in us, `CALLS_A_GRAPH` calls in a replay; at the 2nd size a rail is cut."""
        data = [values(rank, size_bytes // 4).to(DEVICE) for rank in range(2)]
        total = [torch.full_like(each, -7.0) for each in data]

        def capture(rank: int) -> Graph:
            def body() -> None:
                for _ in range(CALLS_A_GRAPH):
                    self.ranks[rank].all_reduce(data[rank], out=total[rank])

            return capture_on_gpu(self.ranks[rank], body)

        graphs = self.both(capture)

        def replay(rank: int) -> tuple[list[float], bool]:
            times = []
            for turn in range(REPLAYS):
                began = time.perf_counter_ns()
                graphs[rank].replay()
                graphs[rank].synchronise()
                times.append((time.perf_counter_ns() - began) / 1e3 / CALLS_A_GRAPH)
                if rank == 0 and size_bytes == LATENCY_BYTES[1] and turn in (CUT_AT, HEAL_AT):
                    self.ranks[0].inject(0, "carrier_loss" if turn == CUT_AT else "heal")
            self.ranks[rank].check()
            expected = self.ranks[rank].host.all_reduce(data[rank].cpu())
            return sorted(times), torch.equal(total[rank].cpu(), expected)

        (times, first), (_, second) = self.both(replay)
        p50, p99, worst = (round(times[at], 1) for at in (REPLAYS // 2, -2, -1))
        self.report.line(
            "graph", right=first and second, bytes=size_bytes, p50_us=p50, p99_us=p99, max_us=worst
        )

    def triton_on_slots(self) -> None:
        """Adds 1 + 1 to a residual of 1; normalising rows of equal numbers gives 1."""

        def fused(rank: int) -> bool:
            ones = torch.ones(4, 4096, device=DEVICE).bfloat16()
            normed, residual = self.ranks[rank].fused.add_rms_norm(
                ones, ones.clone(), ones[0].clone(), 1e-6
            )
            settle()
            self.ranks[rank].check()
            return bool((residual == 3).all()) and bool(((normed - 1).abs() < 0.01).all())

        self.report.line("triton on slots", right=all(self.both(fused)))

    def close(self) -> None:
        self.both(lambda rank: self.ranks[rank].close())
        self.pool.shutdown()
        self.report.line("closed")


def pair(library: str, limit_s: float, report: Report) -> None:
    ranks = Pair(library, limit_s, report)
    for count, dtype in (
        (1024, torch.float32),
        (1 << 16, torch.bfloat16),
        (1 << 20, torch.float32),
    ):
        ranks.eager("eager", count, dtype)
    ranks.cut_rail()
    if ON_GPU:
        for size_bytes in LATENCY_BYTES:
            ranks.graph(size_bytes)
        ranks.triton_on_slots()
    else:
        report.skip("graph")
        report.skip("triton on slots")
    ranks.close()


def rank_of_node(library: str, rank: int, port: int, report: Report) -> None:
    communicator = make(library, rank, NODES * RANKS_A_NODE, port, f"n{rank // RANKS_A_NODE}")
    refused = communicator._stream_core.exchange()
    report.line("exchange", rank=rank, why_not=refused or None)
    for count, dtype in (
        (1024, torch.float32),
        (100_000, torch.bfloat16),
        (1 << 19, torch.float16),
    ):
        same = compare(communicator, rank, count, dtype)
        report.line("node", right=all(same.values()), rank=rank, elements=count, same=same)
    communicator.close()


def node(arguments: list[str], limit_s: float, report: Report) -> None:
    """Starts the ranks, each with a shorter limit than this process.

    A rank counts its limit from its import of torch. Hung ranks must write their tracebacks before
    this process ends, because all processes end together.
    """
    common = [sys.executable, __file__, *arguments, f"--limit-s={limit_s}", f"--port={free_port()}"]
    ranks = [subprocess.Popen([*common, f"--rank={rank}"]) for rank in range(NODES * RANKS_A_NODE)]
    statuses = [rank.wait() for rank in ranks]
    report.line("ranks", right=not any(statuses), statuses=statuses)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("pair", "node"))
    parser.add_argument("--library", default=os.environ.get("R2CCL_CUDA_LIBRARY", "libcuda.so.1"))
    parser.add_argument("--limit-s", type=float, default=120.0, help="seconds (default: 120)")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if os.environ.get("R2SERVE_TEST_ON_GPU") == "1" and not ON_GPU:
        parser.exit(1, "torch.cuda.is_available() is False on a machine with a GPU\n")
    faulthandler.dump_traceback_later(options.limit_s, exit=True)
    report = Report()
    if options.what == "pair":
        pair(options.library, options.limit_s, report)
    elif options.rank is None:
        # A short limit is halved instead, so that a limit below 20 s stays positive.
        node(sys.argv[1:], max(options.limit_s - RANKS_EARLIER_S, options.limit_s / 2), report)
    else:
        rank_of_node(options.library, options.rank, options.port, report)
    return int(not report.right)


if __name__ == "__main__":
    sys.exit(main())
