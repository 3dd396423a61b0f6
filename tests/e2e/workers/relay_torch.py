"""A plain torch job: all-reduces over gloo and a store, until rank 0 hears the line `end`.

Lines of JSON go to standard output. RANK and WORLD_SIZE come from the environment; the command
before this one sets MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import json
import select
import sys
import time

import torch
import torch.distributed as dist


def say(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group() for _ in range(20)]
    for group in groups:
        dist.barrier(group)
    store = dist.distributed_c10d._get_default_store()
    count, worst_s, ends = 0, 0.0, False
    while not ends:
        ends = rank == 0 and bool(select.select([sys.stdin], [], [], 0.002)[0])
        values = torch.tensor([float(count), float(ends)], dtype=torch.float64)
        begun = time.monotonic()
        dist.all_reduce(values)
        store.set(f"{rank}/{count % 8}", str(count))
        # The other rank may be a round ahead.
        found = int(store.get(f"{(rank + 1) % size}/{count % 8}"))
        worst_s = max(worst_s, time.monotonic() - begun)
        if values[0] != count * size or found % 8 != count % 8:
            say({"failed": f"round {count}: sum {values[0]}, key {found}"})
            return
        ends = bool(values[1])
        count += 1
        if count % 50 == 0:
            say({"count": count})
    dist.barrier()  # rank 0 holds the store
    say({"end": count, "worst_ms": round(worst_s * 1000, 1)})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
