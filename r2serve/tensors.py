"""Tensors at the core's door: which ones it takes, and where results go."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from r2serve.errors import InvalidArgumentError

if TYPE_CHECKING:
    import numpy

    Array = torch.Tensor | numpy.ndarray[Any, Any]

# Positions are the values of the core's enums.
DTYPES = {
    torch.float16: 0,
    torch.bfloat16: 1,
    torch.float32: 2,
    torch.float64: 3,
    torch.int8: 4,
    torch.uint8: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 8,
}
CPU = torch.device("cpu")
OPS = {"sum": 0, "prod": 1, "min": 2, "max": 3, "avg": 4}
ALGORITHMS = {None: 0, "auto": 0, "one_shot": 1, "two_shot": 2}


def as_tensor(array: Array) -> torch.Tensor:
    if isinstance(array, torch.Tensor):
        return array
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:  # ValueError: negative strides, foreign byte order
        raise InvalidArgumentError(f"tensor: {error}") from None


def checked(field: str, array: Array, device: torch.device = CPU) -> tuple[torch.Tensor, int]:
    tensor = as_tensor(array)
    code = DTYPES.get(tensor.dtype)
    if code is None or not tensor.is_contiguous() or tensor.device != device:
        raise unusable(field, tensor, device)
    return tensor, code


def target(
    out: Array | None, shape: Sequence[int], source: torch.Tensor, at: int = 0
) -> torch.Tensor:
    if out is None:
        return torch.empty(*shape, dtype=source.dtype, device=source.device)
    return output(out, torch.Size(shape), source, at)


def output(out: Array, shape: torch.Size, source: torch.Tensor, at: int = 0) -> torch.Tensor:
    """Check ``out``.  It may share memory with the input in one way: ``at`` bytes further on."""
    target, _ = checked("out", out, source.device)
    if target.dtype != source.dtype or target.numel() != shape.numel():
        raise InvalidArgumentError(
            f"out: {tuple(target.shape)} of {target.dtype} where {tuple(shape)} of {source.dtype} "
            "is needed"
        )
    begin, target_begin = source.data_ptr(), target.data_ptr()
    overlaps = begin < target_begin + target.nbytes and target_begin < begin + source.nbytes
    if overlaps and target_begin != begin + at:
        raise InvalidArgumentError(
            "out: overlaps the input other than in place; pass the same tensor, the rank's own "
            "part, or separate memory"
        )
    return target


def check_sizes(field: str, sizes: Sequence[int], world_size: int) -> None:
    if len(sizes) != world_size or any(size < 0 for size in sizes):
        raise InvalidArgumentError(
            f"{field}: {list(sizes)} is not one size (0 or more) for each of {world_size} ranks"
        )


def row_elements(
    tensor: torch.Tensor, sizes: Sequence[int], world_size: int, present: Sequence[int]
) -> int:
    """Elements of one row of ``tensor``, which has the rows ``present`` of all ``sizes``."""
    check_sizes("sizes", sizes, world_size)
    expected = sum(present)
    if tensor.dim() == 0 or tensor.shape[0] != expected:
        raise InvalidArgumentError(
            f"tensor: shape {tuple(tensor.shape)} where sizes {list(sizes)} ask for {expected} rows"
        )
    return math.prod(tensor.shape[1:])


def carried(tensor: torch.Tensor) -> torch.Tensor:
    """What goes on the wire for ``tensor``: itself, contiguous, or its bytes.

    A dtype that r2ccl cannot name (float8, complex, …) can still be moved.
    """
    tensor = tensor.contiguous()
    return tensor if tensor.dtype in DTYPES else tensor.view(-1).view(torch.uint8)


def restored(ranks: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What arrived for carried tensors like ``like``: (ranks, *shape of like)."""
    return ranks.view(like.dtype).view(ranks.shape[0], *like.shape)


def like(given: Array, target: torch.Tensor, out: Array | None) -> Array:
    """The output as the caller knows it: his own object, or of the kind that he passed in."""
    if out is not None:
        return out
    return target if isinstance(given, torch.Tensor) else target.numpy()


def unusable(field: str, tensor: torch.Tensor, device: torch.device) -> InvalidArgumentError:
    if tensor.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        return InvalidArgumentError(f"{field}: dtype {tensor.dtype} is none of {names}")
    if tensor.device != device:
        return InvalidArgumentError(
            f"{field}: is on {tensor.device}; this communicator takes tensors on {device}"
        )
    return InvalidArgumentError(
        f"{field}: shape {tuple(tensor.shape)}, strides {tensor.stride()} is not contiguous; "
        "call .contiguous() first"
    )


def unknown_name(op: str, algorithm: str | None) -> InvalidArgumentError:
    if op not in OPS:
        return InvalidArgumentError(f"op: {op!r} is none of {', '.join(OPS)}")
    return InvalidArgumentError(f"algorithm: {algorithm!r} is none of auto, one_shot, two_shot")
