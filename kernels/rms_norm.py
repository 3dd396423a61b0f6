"""A row of RMSNorm inside kernels, and common parts of the RMSNorm kernels' wrappers."""

from __future__ import annotations

import torch
import triton.language as tl

from r2serve.errors import InvalidArgumentError
from r2serve.kernels.arrival import Arrival
from r2serve.kernels.checks import FLOATS, check_apart, check_like, check_slots
from r2serve.kernels.formats import narrow, result, widen
from r2serve.kernels.jit import jit

MAX_HIDDEN = 16384  # a row fits the registers of a program: up to 32 elements per thread


@jit
def add_residual(total: tl.tensor, residual: tl.tensor) -> tl.tensor:
    """Returns the row to normalise, in fp32: the all-reduce's result plus residual.

    ``total`` is the peers' sum in fp32.  The function rounds the sum to the residual's dtype, like
    an all-reduce.
    """
    return widen(narrow(total, residual.dtype)) + widen(residual)


@jit
def normalise(
    x: tl.tensor, weight: tl.tensor, epsilon: tl.tensor, dtype: tl.constexpr, HIDDEN: tl.constexpr
) -> tl.tensor:
    """Returns ``x / sqrt(mean(x^2) + epsilon)`` in weight's dtype, times weight, in ``dtype``.

    ``x`` is 0 outside the row.  The square root and the quotients are exactly rounded, at a small
    cost: a row has only a single square root.  The order of the sum is therefore the only
    difference between devices.
    """
    mean = tl.div_rn(tl.sum(x * x, axis=0), HIDDEN + 0.0)
    factor = tl.div_rn(1.0, tl.sqrt_rn(mean + epsilon))
    scaled = widen(narrow(x * factor, weight.dtype)) * widen(weight)
    # If the weight's dtype is fp32, the rounding to weight's dtype changes nothing.
    return result(widen(narrow(scaled, weight.dtype)), dtype)


def row_layout(hidden: int) -> tuple[int, int]:
    """Returns the elements and warps of a program: up to 16 elements per thread, 32 above 8192.

    The layout depends only on ``hidden`` and determines the order of the row's sum.  A row
    therefore has the same bits regardless of other rows.
    """
    block = max(32, 1 << (hidden - 1).bit_length())
    return block, min(16, max(1, block // 512))


def check_rows(
    slots: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, arrival: Arrival | None
) -> None:
    """Checks the inputs of the RMSNorm kernels; slots are (ring, peers, *rows, hidden)."""
    check_slots("slots", slots, FLOATS, arrival)
    shape = slots.shape[2:]
    if not 1 <= shape[-1] <= MAX_HIDDEN:
        raise InvalidArgumentError(
            f"slots: shape {tuple(slots.shape)} has a hidden size of {shape[-1]}; it must be 1 to "
            f"{MAX_HIDDEN}"
        )
    check_like("residual", residual, shape, (slots.dtype,), slots.device)
    check_like("weight", weight, shape[-1:], FLOATS, slots.device)


def residual_target(
    given: torch.Tensor | None,
    slots: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
) -> torch.Tensor:
    """Returns the new residual's tensor: separate memory, or exactly the old residual's memory."""
    if given is None:
        return torch.empty_like(residual)
    check_like("residual_out", given, residual.shape, (residual.dtype,), residual.device)
    if given.data_ptr() == residual.data_ptr():
        check_apart("residual_out", given, slots=slots, weight=weight)
    else:
        check_apart("residual_out", given, slots=slots, residual=residual, weight=weight)
    return given
