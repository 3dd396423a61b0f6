"""Checks of arguments before any data is sent; an error names the wrong argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from r2serve.engines.torch.landing import check
from r2serve.errors import InvalidArgumentError


def single(given: Sequence[Any]) -> Any:
    """Returns the only element of a list; torch passes an element for each device of a process."""
    if len(given) != 1:
        raise InvalidArgumentError(
            f"tensors: {len(given)} given; must be 1, because r2ccl has 1 device per process"
        )
    return given[0]


def check_shares(
    size: int, field: str, whole: torch.Tensor, share_field: str, share: torch.Tensor
) -> None:
    """Checks that ``whole`` has the elements of ``size`` tensors like ``share``."""
    check([whole, share])
    if whole.numel() != size * share.numel():
        raise InvalidArgumentError(
            f"{field}: shape {tuple(whole.shape)} must have {size} times the elements of the "
            f"{share_field}, {tuple(share.shape)}"
        )


def check_alike(size: int, field: str, several: Sequence[torch.Tensor], one: torch.Tensor) -> None:
    """Checks ``several``: empty, or a tensor of the size of ``one`` for each of ``size`` ranks."""
    check([one, *several])
    counts = {tensor.numel() for tensor in several}
    if several and (len(several) != size or counts != {one.numel()}):
        raise InvalidArgumentError(
            f"{field}: shapes {[tuple(tensor.shape) for tensor in several]}; must be a tensor of "
            f"shape {tuple(one.shape)} for each of {size} ranks"
        )


def check_mine(
    size: int, rank: int, field: str, several: Sequence[torch.Tensor], mine: torch.Tensor
) -> None:
    """Checks ``several``: ``size`` tensors; tensor ``rank`` has as many elements as ``mine``."""
    check([mine, *several])
    if len(several) != size or several[rank].numel() != mine.numel():
        raise InvalidArgumentError(
            f"{field}: shapes {[tuple(tensor.shape) for tensor in several]}; must be a tensor for "
            f"each of {size} ranks, with shape {tuple(mine.shape)} for rank {rank}"
        )


def split_sizes(
    size: int, field: str, tensor: torch.Tensor, unit: int, splits: Sequence[int] | None
) -> list[int]:
    """Returns the size of each rank's shard of ``tensor``, in units of ``unit`` bytes.

    ``splits``: rows of each rank; without ``splits`` the shards are even.
    """
    rows = tensor.shape[0] if tensor.dim() else 0
    if not splits:
        if rows % size:
            raise InvalidArgumentError(
                f"{field}: none given; must be given, because dimension 0 of shape "
                f"{tuple(tensor.shape)} is not divisible by the world size {size}"
            )
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows:
        raise InvalidArgumentError(
            f"{field}: {list(splits)}; must be a size for each of {size} ranks, with sum {rows}"
        )
    row = tensor.nbytes // unit // rows if rows else 0
    return [split * row for split in splits]
