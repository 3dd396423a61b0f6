"""A rank of a comparison: runs turns of all-reduces on request, and prints the median times.

worker.py SITE RANK PORT

A request is a line "BYTES CALLS" of standard input. The answer is a line with the median time of a
call, in us. The worker runs the r2serve of the folder SITE, and uses only calls that old commits
have, too.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

import torch

from r2serve import Communicator, _core


def pin(rank: int) -> None:
    """Pins this process to a CPU. The placement of ranks can double a latency."""
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[rank % len(cpus)]})


def turn(communicator: Communicator, size: int, calls: int) -> float:
    """Returns the median time of ``calls`` calls in us. A quarter as many calls warm up before."""
    data = torch.ones(size // 4)
    out = torch.empty_like(data)
    taken = []
    for call in range(-(calls // 4) - 1, calls):
        began = time.perf_counter_ns()
        communicator.all_reduce(data, out=out)
        if call >= 0:
            taken.append(time.perf_counter_ns() - began)
    return statistics.median(taken) / 1e3


def main(site: Path, rank: int, port: int) -> None:
    if not Path(_core.__file__).is_relative_to(site):
        raise SystemExit(f"imported {_core.__file__}; must be below {site}")
    torch.set_num_threads(1)
    pin(rank)
    communicator = Communicator.standalone("127.0.0.1", port, rank, 2)
    for line in sys.stdin:
        size, calls = map(int, line.split())
        sys.stdout.write(f"{turn(communicator, size, calls)}\n")
        sys.stdout.flush()
    communicator.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
