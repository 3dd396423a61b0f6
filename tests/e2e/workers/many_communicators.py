"""A rank that repeatedly opens, uses and closes communicators of the same torch group."""

from __future__ import annotations

import gc
from datetime import timedelta

import torch
from parent import ARGUMENTS, resources, say

from r2serve import Communicator

ME, RANKS = ARGUMENTS["rank"], ARGUMENTS["ranks"]


def main() -> None:
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{ARGUMENTS['host']}:{ARGUMENTS['port']}",
        rank=ME,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    group = torch.distributed.group.WORLD
    assert group is not None
    lasting = Communicator.from_group(group, name="lasting")
    for number in range(ARGUMENTS["count"]):
        if number == ARGUMENTS["warm"]:
            gc.collect()
            say(resources())
        with Communicator.from_group(group, name="passing") as passing:
            data = torch.full((1000,), float(number + ME))
            assert passing.all_reduce(data)[7] == RANKS * number + 1
            assert lasting.all_reduce(data)[7] == RANKS * number + 1
    gc.collect()
    lasting.barrier()
    say(resources() | {"rails": len(lasting.rails())})
    lasting.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
