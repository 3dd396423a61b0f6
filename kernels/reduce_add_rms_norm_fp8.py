"""``reduce_add_rms_norm`` with a normed output quantised to fp8, with a scale per row."""

from __future__ import annotations

import torch
import triton.language as tl

from r2serve.kernels.arrival import (
    BEFORE,
    BY_ITSELF,
    Arrival,
    await_arrival,
    ring_offset,
    waiting,
)
from r2serve.kernels.checks import check_apart, check_like, native_fp8
from r2serve.kernels.formats import (
    magnitude_bits,
    result,
    scale_of,
    to_e4m3,
    widen,
)
from r2serve.kernels.jit import NO_FUSION, jit
from r2serve.kernels.rms_norm import (
    add_residual,
    check_rows,
    normalise,
    residual_target,
    row_layout,
)
from r2serve.kernels.slots import sum_slots

LARGEST = 448.0  # of e4m3fn
SMALLEST_SCALE = 1.0 / (LARGEST * 512.0)  # vLLM's value; gives a row of zeros a non-zero scale


@jit
def _kernel(
    slots: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    residual_out: tl.tensor,
    epsilon: tl.tensor,
    ring_stride: tl.tensor,
    peer_stride: tl.tensor,
    sequence: tl.tensor,
    arrived: tl.tensor,
    abort: tl.tensor,
    gave_up: tl.tensor,
    LARGEST: tl.constexpr,
    SMALLEST_SCALE: tl.constexpr,
    NATIVE: tl.constexpr,
    WAIT: tl.constexpr,
    RING: tl.constexpr,
    PEERS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    THREADS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < HIDDEN
    offsets = row * HIDDEN + columns
    old = tl.load(residual + offsets, mask=mask, other=0.0)
    gain = tl.load(weight + columns, mask=mask, other=0.0)
    if WAIT == BY_ITSELF:
        if not await_arrival(sequence, arrived, abort, THREADS):
            return
    elif WAIT == BEFORE:
        given_up = tl.load(gave_up)
    first = slots + ring_offset(sequence, ring_stride, RING, WAIT)
    x = add_residual(sum_slots(first, peer_stride, offsets, mask, PEERS), old)
    normed = widen(normalise(x, gain, epsilon, old.dtype, HIDDEN))
    # Outside the row, x and weight are 0.  normed is 0 there, or NaN if the whole row is NaN.
    largest = tl.max(magnitude_bits(normed), axis=0)
    scale = scale_of(largest, LARGEST, SMALLEST_SCALE)
    codes = to_e4m3(normed * tl.div_rn(1.0, scale), NATIVE)
    # Two nested ifs: the compiler evaluates the outer if, the kernel evaluates the inner if.
    if WAIT == BEFORE:  # noqa: SIM102
        if given_up != 0:
            return
    tl.store(residual_out + offsets, result(x, residual_out.dtype.element_ty), mask=mask)
    tl.store(out + offsets, codes, mask=mask)
    tl.store(scales + row, scale)


def reduce_add_rms_norm_fp8(
    slots: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    *,
    out: torch.Tensor | None = None,
    scales_out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    arrival: Arrival | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes ``reduce_add_rms_norm`` and quantises; returns (codes, scales, new residual).

    ``out`` is (*rows, hidden) of float8_e4m3fn, ``scales_out`` is (*rows, 1) of float32; both must
    be separate memory.  The other arguments are as in ``reduce_add_rms_norm``.  Raises
    InvalidArgumentError.

    y is the normed row of ``reduce_add_rms_norm``; only the order of the sum of squares may differ.
    scale = max(amax|y| / 448, 1 / (448 * 512)), and code = y * (1 / scale), both in fp32.  Codes
    are rounded to e4m3fn, to nearest even.  This is vLLM's dynamic per-token quantisation.

    If the scale is above the minimum, the error of code * scale is at most
    amax|y| (1/28 + 2^-21): half of e4m3fn's largest step, and five roundings in fp32.  The new
    residual has the bits of the reference.  For the same y, codes and scales also have the bits of
    the reference.

    A row with NaN has a NaN scale and NaN codes (0x7f).  A row with infinity and without NaN has an
    infinite scale, codes of 0 for finite elements, and NaN codes for infinite elements.  In both
    cases, codes times scale are NaN in the whole row.
    """
    check_rows(slots, residual, weight, arrival)
    residual_out = residual_target(residual_out, slots, residual, weight)
    device = residual.device
    if out is None:
        out = torch.empty(residual.shape, dtype=torch.float8_e4m3fn, device=device)
    else:
        check_like("out", out, residual.shape, (torch.float8_e4m3fn,), device)
        check_apart(
            "out", out, slots=slots, residual=residual, weight=weight, residual_out=residual_out
        )
    scales_shape = (*residual.shape[:-1], 1)
    if scales_out is None:
        scales_out = torch.empty(scales_shape, dtype=torch.float32, device=device)
    else:
        check_like("scales_out", scales_out, scales_shape, (torch.float32,), device)
        check_apart(
            "scales_out",
            scales_out,
            slots=slots,
            residual=residual,
            weight=weight,
            residual_out=residual_out,
            out=out,
        )
    hidden = residual.shape[-1]
    rows = residual.numel() // hidden
    if rows == 0:
        return out, scales_out, residual_out
    block, warps = row_layout(hidden)
    sequence, arrived, abort, gave_up, wait = waiting(arrival, rows)
    _kernel[(rows,)](
        slots,
        residual,
        weight,
        out.view(torch.uint8),
        scales_out,
        residual_out,
        epsilon,
        slots.stride(0),
        slots.stride(1),
        sequence,
        arrived,
        abort,
        gave_up,
        LARGEST=LARGEST,
        SMALLEST_SCALE=SMALLEST_SCALE,
        NATIVE=native_fp8(device),
        WAIT=wait,
        RING=slots.shape[0],
        PEERS=slots.shape[1],
        HIDDEN=hidden,
        BLOCK=block,
        THREADS=32 * warps,
        num_warps=warps,
        **NO_FUSION,
    )
    return out, scales_out, residual_out
