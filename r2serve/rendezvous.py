"""Exchange of information among the ranks of a communicator before any link exists.

The first information of a rank begins with its release, so that different releases are named before
anything else of another release is read. Readers ignore fields that they do not know.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from r2serve import _core
from r2serve.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]

Exchange = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""Returns the values of all ranks in rank order; a collective call."""


def with_release(info: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a rank's first information, with the rank's release before it."""
    return {"r2serve": version("r2serve"), "wire": _core.wire_version, **info}


def check_releases(infos: Sequence[Mapping[str, Any]], rank: int) -> None:
    """Compares the releases of all ranks, in rank order; ``rank`` is this rank.

    Raises:
        ConfigError: a rank has another release than this rank.
    """
    own = _release(infos[rank])
    for other, info in enumerate(infos):
        if _release(info) != own:
            raise ConfigError(
                f"rank {other} (host {info.get('host', 'unknown')}) runs {_release(info)}; this is "
                f"rank {rank} (host {infos[rank].get('host', 'unknown')}) with {own}: all ranks "
                "must run the same release"
            )


def _release(info: Mapping[str, Any]) -> str:
    if "r2serve" not in info:
        return "an r2serve that does not name its version"
    return f"r2serve {info['r2serve']} (wire version {info.get('wire', 'unknown')})"


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
