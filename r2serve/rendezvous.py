"""Exchange of information among the ranks of a communicator before any link exists."""

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
"""Returns the values of all ranks in rank order; a collective call."""


def over_group(group: ProcessGroup) -> Exchange:
    """Makes an exchange over a torch group able to exchange Python objects: any CPU group."""
    world_size = torch.distributed.get_world_size(group)

    def exchange(own: dict[str, Any]) -> list[dict[str, Any]]:
        gathered: list[Any] = [None] * world_size
        torch.distributed.all_gather_object(gathered, own, group=group)
        return gathered

    return exchange


def over_store(store: Store, name: str, rank: int, world_size: int) -> Exchange:
    """Makes an exchange over a store common to all ranks; the store's timeout applies.

    A name may be used again after all ranks have joined under the name.
    """
    rounds = itertools.count()
    generation = (store.add(f"r2ccl/{name}/joined", 1) - 1) // world_size

    def exchange(own: dict[str, Any]) -> list[dict[str, Any]]:
        key = f"r2ccl/{name}/{generation}/{next(rounds)}"
        store.set(f"{key}/{rank}", json.dumps(own))
        return [json.loads(store.get(f"{key}/{other}")) for other in range(world_size)]

    return exchange


def outlive(store: Store, name: str, rank: int, world_size: int, at_most_s: float) -> None:
    """Keeps rank 0's store alive until every other rank has finished its reads.

    Rank 0 waits at most ``at_most_s`` seconds, because a rank may be gone.
    """
    key = f"r2ccl/{name}/read"
    with contextlib.suppress(RuntimeError):  # raised by torch if the store or a rank is gone
        if rank > 0:
            store.set(f"{key}/{rank}", "")
        else:
            others = [f"{key}/{other}" for other in range(1, world_size)]
            store.wait(others, timedelta(seconds=at_most_s))


def host_of(store: Any) -> str | None:
    """Returns the host of a store, or None for stores without a host."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None)
