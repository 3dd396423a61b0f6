"""Argument checks of the kernels' wrappers.

All checks raise InvalidArgumentError, with the field, the value and valid values.  Checks run at
every call, and therefore read only the metadata of tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from r2serve.errors import InvalidArgumentError
from r2serve.kernels.arrival import Arrival
from r2serve.kernels.jit import INTERPRETED

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
MAX_PEERS = 16


def names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check_dtype(field: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in dtypes:
        raise InvalidArgumentError(f"{field}: dtype {tensor.dtype} is none of {names(dtypes)}")


def check_place(field: str, tensor: torch.Tensor) -> None:
    """Checks that the tensor is on the device of this process's kernels."""
    if tensor.is_cuda:
        current = torch.cuda.current_device()
        if tensor.device.index != current:
            raise InvalidArgumentError(
                f"{field}: is on {tensor.device} while cuda:{current} is the current device"
            )
    elif not (INTERPRETED and tensor.is_cpu):
        raise InvalidArgumentError(f"{field}: is on {tensor.device}; it must be on a CUDA device")


def check_slots(
    field: str, slots: torch.Tensor, dtypes: Sequence[torch.dtype], arrival: Arrival | None
) -> None:
    """Checks a ring of peer slots: shape (ring, peers, *shape), each slot contiguous.

    Strides of the first two dimensions are free: slots may be larger than the contents.
    """
    check_dtype(field, slots, dtypes)
    check_place(field, slots)
    shape = tuple(slots.shape)
    if len(shape) < 3:
        raise InvalidArgumentError(f"{field}: shape {shape}; it must be (ring, peers, ...)")
    if not 1 <= shape[1] <= MAX_PEERS:
        raise InvalidArgumentError(
            f"{field}: shape {shape} has {shape[1]} peers; it must have 1 to {MAX_PEERS}"
        )
    ring = shape[0]
    if arrival is None:
        if ring != 1:
            raise InvalidArgumentError(
                f"{field}: shape {shape} has a ring of {ring}; without an arrival it must be 1"
            )
    else:
        if ring < 1 or ring & (ring - 1):
            raise InvalidArgumentError(
                f"{field}: shape {shape} has a ring of {ring}; it must be a power of two"
            )
        if arrival.sequence.device != slots.device:
            raise InvalidArgumentError(
                f"arrival: sequence is on {arrival.sequence.device}, {field} is on {slots.device}"
            )
    if not _is_dense(shape[2:], slots.stride()[2:]):
        raise InvalidArgumentError(
            f"{field}: shape {shape}, strides {slots.stride()} has slots that are not contiguous"
        )


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    if 0 in shape:
        return True
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def check_like(
    field: str,
    tensor: torch.Tensor,
    shape: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> None:
    """Checks contiguity, shape, device and dtype (any of ``dtypes``) of a tensor."""
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype not in dtypes:
        raise InvalidArgumentError(
            f"{field}: {tuple(tensor.shape)} of {tensor.dtype} where {tuple(shape)} of "
            f"{names(dtypes)} is needed"
        )
    if tensor.device != device:
        raise InvalidArgumentError(f"{field}: is on {tensor.device}; it must be on {device}")
    if not tensor.is_contiguous():
        raise InvalidArgumentError(
            f"{field}: shape {tuple(tensor.shape)}, strides {tensor.stride()} is not contiguous"
        )


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the addresses of the first byte and of the end, for any strides."""
    first = tensor.data_ptr()
    if tensor.numel() == 0:
        return first, first
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * tensor.element_size()


def check_apart(field: str, out: torch.Tensor, /, **others: torch.Tensor) -> None:
    """Checks that the caller's output does not overlap any other tensor of the kernel."""
    first, end = span(out)
    for name, other in others.items():
        begin, past = span(other)
        if first < past and begin < end:
            raise InvalidArgumentError(
                f"{field}: overlaps {name} in memory; it must be separate memory"
            )


@functools.cache
def native_fp8(device: torch.device) -> bool:
    """Whether the device has instructions for conversions to and from e4m3."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
