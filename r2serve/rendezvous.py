"""How the ranks of a communicator tell each other about themselves, before any link is there."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]

Exchange = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""Gives what all ranks gave, in rank order; every rank calls it as often as the others."""


def over_group(group: ProcessGroup) -> Exchange:
    """Over a torch group that can exchange Python objects: any CPU group."""
    world_size = torch.distributed.get_world_size(group)

    def exchange(own: dict[str, Any]) -> list[dict[str, Any]]:
        gathered: list[Any] = [None] * world_size
        torch.distributed.all_gather_object(gathered, own, group=group)
        return gathered

    return exchange


def over_store(store: Store, name: str, rank: int, world_size: int) -> Exchange:
    """Over a store that all ranks reach; waits as long as the store does.

    The same name may be used again, when all ranks have come under it before.
    """
    rounds = itertools.count()
    generation = (store.add(f"r2ccl/{name}/joined", 1) - 1) // world_size

    def exchange(own: dict[str, Any]) -> list[dict[str, Any]]:
        key = f"r2ccl/{name}/{generation}/{next(rounds)}"
        store.set(f"{key}/{rank}", json.dumps(own))
        return [json.loads(store.get(f"{key}/{other}")) for other in range(world_size)]

    return exchange


def outlive(store: Store, name: str, rank: int, world_size: int, at_most_s: float) -> None:
    """Keep the store of rank 0 until every other rank has finished its reads.

    Rank 0 waits for the other ranks, but at most ``at_most_s`` seconds, as a rank may be gone.
    """
    key = f"r2ccl/{name}/read"
    with contextlib.suppress(RuntimeError):  # torch's: the store or a rank is gone
        if rank > 0:
            store.set(f"{key}/{rank}", "")
        else:
            others = [f"{key}/{other}" for other in range(1, world_size)]
            store.wait(others, timedelta(seconds=at_most_s))


def host_of(store: Any) -> str | None:
    """Where a store is, if it is one that is somewhere."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None)
