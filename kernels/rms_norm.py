"""A row of RMSNorm inside kernels, and what its kernels' wrappers have in common."""

from __future__ import annotations

import torch
import triton.language as tl

from r2serve.errors import InvalidArgumentError
from r2serve.kernels.arrival import Arrival
from r2serve.kernels.checks import FLOATS, check_apart, check_like, check_slots
from r2serve.kernels.formats import narrow, result, widen
from r2serve.kernels.jit import jit

MAX_HIDDEN = 16384  # a row lives in the registers of one program: 32 elements a thread at most


@jit
def add_residual(total: tl.tensor, residual: tl.tensor) -> tl.tensor:
    """The row that is normalised, in fp32: the sum as the all-reduce would give it, plus residual.

    ``total`` is the peers' sum in fp32, rounded here to the residual's dtype.
    """
    return widen(narrow(total, residual.dtype)) + widen(residual)


@jit
def normalise(
    x: tl.tensor, weight: tl.tensor, epsilon: tl.tensor, dtype: tl.constexpr, HIDDEN: tl.constexpr
) -> tl.tensor:
    """``x / sqrt(mean(x^2) + epsilon)`` in weight's dtype, times weight, in ``dtype``.

    ``x`` is 0 outside the row.  The square root and the quotient are the exactly rounded ones: they
    are one number a row, and leave the order of the sum as the only difference between devices.
    """
    mean = tl.div_rn(tl.sum(x * x, axis=0), HIDDEN + 0.0)
    factor = tl.div_rn(1.0, tl.sqrt_rn(mean + epsilon))
    scaled = widen(narrow(x * factor, weight.dtype)) * widen(weight)
    # Where the weight is the wider of the two, its rounding is the identity.
    return result(widen(narrow(scaled, weight.dtype)), dtype)


def row_layout(hidden: int) -> tuple[int, int]:
    """Elements that a program holds, and its warps: 16 elements a thread while there are threads.

    By ``hidden`` alone: the layout fixes the order of the row's sum, so a row has the same bits
    whatever rows are beside it.
    """
    block = max(32, 1 << (hidden - 1).bit_length())
    return block, min(16, max(1, block // 512))


def check_rows(
    slots: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, arrival: Arrival | None
) -> None:
    """The inputs of the kernels here: slots (ring, peers, *rows, hidden) and what goes with it."""
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
    """Where the new residual goes: memory of its own, or exactly that of the old one."""
    if given is None:
        return torch.empty_like(residual)
    check_like("residual_out", given, residual.shape, (residual.dtype,), residual.device)
    if given.data_ptr() == residual.data_ptr():
        check_apart("residual_out", given, slots=slots, weight=weight)
    else:
        check_apart("residual_out", given, slots=slots, residual=residual, weight=weight)
    return given
