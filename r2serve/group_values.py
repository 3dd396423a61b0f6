"""Exchange of plain values over a torch group, as JSON.

torch's own collectives of objects unpickle what a peer sent, and a pickle may run any code.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LONGEST_TEXT = 16 << 20
"""Bytes of a rank's text, at most."""


def all_gather_values(value: Any, group: ProcessGroup) -> list[Any]:
    """Returns the values of all ranks in rank order; collective over the group.

    ``value``: what JSON can hold; a tuple arrives as a list. ``group``: a group with collectives of
    CPU tensors.

    Raises:
        ValueError: the text of a rank is too long or no JSON; the same on all ranks.
    """
    text = json.dumps(value).encode()
    ranks = dist.get_world_size(group)
    lengths = [torch.empty(1, dtype=torch.int64, device="cpu") for _ in range(ranks)]
    dist.all_gather(lengths, torch.tensor([len(text)], device="cpu"), group=group)
    sizes = [int(length.item()) for length in lengths]
    for rank, size in enumerate(sizes):
        if not 0 < size <= LONGEST_TEXT:
            raise ValueError(
                f"the value of rank {rank} has {size} bytes; must be 1 to {LONGEST_TEXT} bytes"
            )
    own = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
    own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(texts, own, group=group)
    found = zip(texts, sizes, strict=True)
    return [_read(padded[:size], rank) for rank, (padded, size) in enumerate(found)]


def _read(text: torch.Tensor, rank: int) -> Any:
    try:
        return json.loads(text.numpy().tobytes())
    except ValueError as error:
        raise ValueError(f"the value of rank {rank} is no JSON: {error}") from error
