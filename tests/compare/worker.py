"""A rank of a comparison: prints the median time of all-reduces of several sizes, in us, as JSON.

worker.py RANK PORT

The worker runs the r2serve of its PYTHONPATH, and uses only calls that old commits have, too.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch

from r2serve import Communicator

POINTS = {1 << 10: 2000, 16 << 10: 1500, 256 << 10: 300, 4 << 20: 40}
"""Repetitions by size in bytes."""


def main(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    communicator = Communicator.standalone("127.0.0.1", port, rank, 2)
    medians = {}
    for size, times in POINTS.items():
        data = torch.ones(size // 4)
        out = torch.empty_like(data)
        taken = []
        for turn in range(times + times // 4):
            began = time.perf_counter_ns()
            communicator.all_reduce(data, out=out)
            if turn >= times // 4:
                taken.append(time.perf_counter_ns() - began)
        medians[size] = statistics.median(taken) / 1e3
    communicator.close()
    if rank == 0:
        sys.stdout.write(json.dumps(medians))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
