"""A rank of a small data-parallel training; reports exact losses and the times of the steps."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist
from parent import ARGUMENTS, hear, say
from torch.nn.parallel import DistributedDataParallel

import r2serve.engines.torch

WIDTH, BATCH, STEPS = 512, 16, ARGUMENTS["steps"]


def main() -> None:
    torch.set_num_threads(1)
    rank, ranks = ARGUMENTS["rank"], ARGUMENTS["ranks"]
    dist.init_process_group(
        ARGUMENTS["backend"],
        init_method=f"tcp://{ARGUMENTS['host']}:{ARGUMENTS['port']}",
        rank=rank,
        world_size=ranks,
    )
    torch.manual_seed(1)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())]
    model = DistributedDataParallel(torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 1)))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses, seconds = [], []
    say({"ready": rank})
    hear()
    for step in range(STEPS):
        torch.manual_seed(1000 * step + rank)
        inputs = torch.randn(BATCH, WIDTH)
        began = time.monotonic()
        optimiser.zero_grad()
        loss = (model(inputs) - inputs.mean(1, keepdim=True)).square().mean()
        loss.backward()
        optimiser.step()
        seconds.append(time.monotonic() - began)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item().hex())
        if step in ARGUMENTS["pauses"]:
            say({"step": step})
            hear()
    lost = 0
    if ARGUMENTS["backend"] == r2serve.engines.torch.BACKEND:
        events = dist.group.WORLD.communicator.events()
        lost = sum(event.kind == "rail_state" and event.value for event in events)
    say(
        {
            "losses": losses,
            "median_s": statistics.median(seconds),
            "worst_s": max(seconds),
            "total_s": sum(seconds),
            "rails_lost": lost,
        }
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
