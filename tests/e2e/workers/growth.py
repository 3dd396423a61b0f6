"""A rank with rails that fail and rejoin repeatedly; reports memory, descriptors and threads."""

from __future__ import annotations

import gc
import time

import torch
from parent import ARGUMENTS, resources, say

from r2serve import Communicator

ME, CYCLES, WARM = ARGUMENTS["rank"], ARGUMENTS["cycles"], ARGUMENTS["warm"]
PATIENCE_S = 30.0


def up(communicator: Communicator, rail: int) -> bool:
    return communicator.rails()[rail].state == "UP"


def settled(communicator: Communicator) -> dict[str, int]:
    """Returns the minimum of several samples, with all rails UP and no handshake under way."""
    gc.collect()
    looks: list[dict[str, int]] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(looks) < 20:
        epochs = [rail.epoch for rail in communicator.rails() if rail.state == "UP"]
        look = resources()
        if epochs == [rail.epoch for rail in communicator.rails()]:
            looks.append(look)
        elif time.monotonic() > deadline:
            raise TimeoutError(f"rails keep changing: {communicator.rails()}")
        time.sleep(0.05)
    return min(looks, key=lambda look: look["descriptors"])


def cycle(communicator: Communicator, number: int) -> None:
    """A rail fails at one end, traffic continues, and the rail rejoins at both ends."""
    rail, breaker = number % 2, number // 2 % 2
    # A short drop may end before the rail goes DOWN, so a cut follows each drop.
    for fault in ("black_hole", "carrier_loss") if number % 16 == 15 else ("carrier_loss",):
        if breaker == ME:
            communicator.inject(rail, fault)
        data = torch.full((256,), float(number % 1000))
        summed = communicator.all_reduce(data)
        assert isinstance(summed, torch.Tensor)
        assert torch.equal(summed, 2 * data)
        if breaker == ME:
            communicator.inject(rail, "heal")
    deadline = time.monotonic() + PATIENCE_S
    while True:
        joined = torch.tensor([1 if up(communicator, rail) else 0], dtype=torch.int32)
        if communicator.all_reduce(joined, "min")[0]:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"cycle {number}: {communicator.rails()[rail]}")


def main() -> None:
    communicator = Communicator.standalone(ARGUMENTS["host"], ARGUMENTS["port"], ME, 2)
    began = time.monotonic()
    for number in range(CYCLES):
        if number == WARM:
            say(settled(communicator))
        cycle(communicator, number)
    rails = communicator.rails()
    say(
        settled(communicator)
        | {
            "seconds": time.monotonic() - began,
            "epochs": sum(rail.epoch for rail in rails),
            "replays": sum(rail.replayed_chunks for rail in rails),
        }
    )
    communicator.barrier()
    communicator.close()


if __name__ == "__main__":
    main()
