"""Nodes of the ranks of a group, determined before the group has an r2ccl engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from r2serve.config import Config
from r2serve.ports.identity import node_identity

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_latest_spans_nodes = False


def spans_nodes(group: ProcessGroup, config: Config) -> bool:
    """Whether the ranks of ``group`` are on several nodes; collective over the group."""
    import torch.distributed as dist

    from r2serve.group_values import all_gather_values

    global _latest_spans_nodes
    mine = node_identity(config.node, dist.get_rank())
    _latest_spans_nodes = len(set(all_gather_values(mine, group))) > 1
    return _latest_spans_nodes


def latest_group_spans_nodes() -> bool:
    """Returns the answer for the most recent group.

    An engine may ask how to call a group's collectives right after the creation of the group's
    communicator, without a name of the group.
    """
    return _latest_spans_nodes
