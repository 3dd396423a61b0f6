"""What the operations of a group refuse before anything is sent, with the name of what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from r2serve.engines.torch.landing import check
from r2serve.errors import InvalidArgumentError


def single(given: Sequence[Any]) -> Any:
    """torch's interface has lists for several devices of a process; there is one."""
    if len(given) != 1:
        raise InvalidArgumentError(f"tensors: {len(given)} lists; r2ccl has one device a process")
    return given[0]


def check_shares(
    size: int, field: str, whole: torch.Tensor, share_field: str, share: torch.Tensor
) -> None:
    """``whole`` has one ``share`` for each of ``size`` ranks."""
    check([whole, share])
    if whole.numel() != size * share.numel():
        raise InvalidArgumentError(
            f"{field}: shape {tuple(whole.shape)} has not {size} times the elements of the "
            f"{share_field}, {tuple(share.shape)}"
        )


def check_alike(size: int, field: str, several: Sequence[torch.Tensor], one: torch.Tensor) -> None:
    """None, or one of the size of ``one`` for each of ``size`` ranks."""
    check([one, *several])
    counts = {tensor.numel() for tensor in several}
    if several and (len(several) != size or counts != {one.numel()}):
        raise InvalidArgumentError(
            f"{field}: shapes {[tuple(tensor.shape) for tensor in several]}, where one of "
            f"{tuple(one.shape)} for each of {size} ranks is needed"
        )


def check_mine(
    size: int, rank: int, field: str, several: Sequence[torch.Tensor], mine: torch.Tensor
) -> None:
    """One of any size for each of ``size`` ranks; that of ``rank`` is of the size of ``mine``."""
    check([mine, *several])
    if len(several) != size or several[rank].numel() != mine.numel():
        raise InvalidArgumentError(
            f"{field}: shapes {[tuple(tensor.shape) for tensor in several]}, where one for each of "
            f"{size} ranks is needed, and {tuple(mine.shape)} for rank {rank}"
        )


def split_sizes(
    size: int, field: str, tensor: torch.Tensor, unit: int, splits: Sequence[int] | None
) -> list[int]:
    """Units of so many bytes for each rank: even shares, or ``splits`` rows of ``tensor``."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not splits:
        if rows % size:
            raise InvalidArgumentError(
                f"{field}: none given, and dimension 0 of shape {tuple(tensor.shape)} is not "
                f"divisible by the world size {size}"
            )
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows:
        raise InvalidArgumentError(
            f"{field}: {list(splits)} is not one size for each of {size} ranks, {rows} together"
        )
    row = tensor.nbytes // unit // rows if rows else 0
    return [split * row for split in splits]
