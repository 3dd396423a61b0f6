"""Checks and conversions of tensors before their pointers go to the core."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from r2serve.errors import InvalidArgumentError

if TYPE_CHECKING:
    import numpy

    Array = torch.Tensor | numpy.ndarray[Any, Any]

# Codes are the values of the core's enums.
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
ALGORITHMS = {None: 0, "auto": 0, "one_shot": 1, "two_shot": 2, "two_shot_overlap": 3}


def as_tensor(array: Array) -> torch.Tensor:
    """Returns a tensor that shares memory with ``array``, or raises InvalidArgumentError."""
    if isinstance(array, torch.Tensor):
        return array
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:  # ValueError: negative strides, foreign byte order
        raise InvalidArgumentError(f"tensor: {error}") from None


def checked(field: str, array: Array, device: torch.device = CPU) -> tuple[torch.Tensor, int]:
    """Returns the array as a tensor, and the core's code of its dtype.

    Raises:
        InvalidArgumentError: unsupported dtype, not contiguous, or not on ``device``.
    """
    tensor = as_tensor(array)
    code = DTYPES.get(tensor.dtype)
    if code is None or not tensor.is_contiguous() or tensor.device != device:
        raise unusable(field, tensor, device)
    return tensor, code


def target(
    out: Array | None, shape: Sequence[int], source: torch.Tensor, at: int = 0
) -> torch.Tensor:
    """Returns ``out`` after the checks of :func:`output`, or a new tensor like ``source``."""
    if out is None:
        return torch.empty(*shape, dtype=source.dtype, device=source.device)
    return output(out, torch.Size(shape), source, at)


def output(out: Array, shape: torch.Size, source: torch.Tensor, at: int = 0) -> torch.Tensor:
    """Returns ``out`` as a tensor, with the dtype of ``source`` and the element count of ``shape``.

    An overlap with ``source`` is allowed only if ``out`` begins exactly ``at`` bytes after it.

    Raises:
        InvalidArgumentError: a rule above is broken, or ``out`` is unusable (:func:`checked`).
    """
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
            "out: overlaps the input at a wrong offset; must be the same tensor, the rank's own "
            "shard, or separate memory"
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
    """Returns the number of elements of a row, and checks ``sizes`` and the number of rows.

    ``present``: the entries of ``sizes`` whose rows this rank's ``tensor`` holds.
    """
    check_sizes("sizes", sizes, world_size)
    expected = sum(present)
    if tensor.dim() == 0 or tensor.shape[0] != expected:
        raise InvalidArgumentError(
            f"tensor: shape {tuple(tensor.shape)} where sizes {list(sizes)} ask for {expected} rows"
        )
    return math.prod(tensor.shape[1:])


def carried(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the wire form of ``tensor``: the contiguous tensor, or its bytes.

    The byte form allows dtypes unknown to the core (float8, complex, …) in data movement.
    """
    tensor = tensor.contiguous()
    return tensor if tensor.dtype in DTYPES else raw(tensor)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a contiguous tensor, flat, in the tensor's memory."""
    flat = tensor.view(-1)
    if flat.stride(0) != 1:  # allowed for up to one element, but not for views as another dtype
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def restored(ranks: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Undoes :func:`carried` on received data: returns (ranks, *like.shape) of ``like``'s dtype."""
    return ranks.view(like.dtype).view(ranks.shape[0], *like.shape)


def like(given: Array, target: torch.Tensor, out: Array | None) -> Array:
    """Returns ``out`` if given, else ``target`` as the caller's type (torch or NumPy)."""
    if out is not None:
        return out
    return target if isinstance(given, torch.Tensor) else target.numpy()


def unusable(field: str, tensor: torch.Tensor, device: torch.device) -> InvalidArgumentError:
    """Returns the error for a tensor refused by :func:`checked`."""
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
    """Returns the error for an unknown ``op`` or, if ``op`` is known, an unknown ``algorithm``."""
    if op not in OPS:
        return InvalidArgumentError(f"op: {op!r} is none of {', '.join(OPS)}")
    names = ", ".join(name for name in ALGORITHMS if name)
    return InvalidArgumentError(f"algorithm: {algorithm!r} is none of {names}")
