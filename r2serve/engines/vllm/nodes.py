"""Which ranks of a group share a node, asked before any engine of ours is made for the group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from r2serve.config import Config
from r2serve.ports.identity import node_identity

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_latest_spans_nodes = False


def spans_nodes(group: ProcessGroup, config: Config) -> bool:
    """Whether the ranks of ``group`` live on more than one node; collective over the group."""
    import torch.distributed as dist

    global _latest_spans_nodes
    mine = node_identity(config.node, dist.get_rank())
    everyone: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    _latest_spans_nodes = len(set(everyone)) > 1
    return _latest_spans_nodes


def latest_group_spans_nodes() -> bool:
    """The answer for the group that was made last.

    vLLM asks the platform how to call the collectives of a group right after it made the group's
    communicator, without saying which group it means.
    """
    return _latest_spans_nodes
