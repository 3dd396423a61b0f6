"""Sum of an all-reduce, residual addition and RMSNorm in a single pass over memory."""

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
from r2serve.kernels.checks import check_apart, check_like
from r2serve.kernels.formats import result
from r2serve.kernels.jit import NO_FUSION, jit
from r2serve.kernels.rms_norm import (
    add_residual,
    check_rows,
    normalise,
    residual_target,
    row_layout,
)
from r2serve.kernels.slots import sum_slots


@jit
def _kernel(
    slots: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    residual_out: tl.tensor,
    epsilon: tl.tensor,
    ring_stride: tl.tensor,
    peer_stride: tl.tensor,
    sequence: tl.tensor,
    arrived: tl.tensor,
    abort: tl.tensor,
    gave_up: tl.tensor,
    WAIT: tl.constexpr,
    RING: tl.constexpr,
    PEERS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    THREADS: tl.constexpr,
) -> None:
    columns = tl.arange(0, BLOCK)
    mask = columns < HIDDEN
    offsets = tl.program_id(0).to(tl.int64) * HIDDEN + columns
    # These loads come before the wait: the wait hides their memory latency.
    old = tl.load(residual + offsets, mask=mask, other=0.0)
    gain = tl.load(weight + columns, mask=mask, other=0.0)
    if WAIT == BY_ITSELF:
        if not await_arrival(sequence, arrived, abort, THREADS):
            return
    elif WAIT == BEFORE:
        given_up = tl.load(gave_up)
    first = slots + ring_offset(sequence, ring_stride, RING, WAIT)
    x = add_residual(sum_slots(first, peer_stride, offsets, mask, PEERS), old)
    normed = normalise(x, gain, epsilon, out.dtype.element_ty, HIDDEN)
    # Two nested ifs: the compiler evaluates the outer if, the kernel evaluates the inner if.
    if WAIT == BEFORE:  # noqa: SIM102
        if given_up != 0:
            return
    tl.store(residual_out + offsets, result(x, residual_out.dtype.element_ty), mask=mask)
    tl.store(out + offsets, normed, mask=mask)


def reduce_add_rms_norm(
    slots: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    *,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    arrival: Arrival | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums the peers' slots, adds ``residual`` and normalises; returns (normed, new residual).

    ``slots`` is (ring, peers, *rows, hidden), with ring, peers and ``arrival`` as in
    ``reduce_chunks``.  ``residual`` and both outputs are (*rows, hidden) of the slots' dtype.
    ``weight`` is (hidden,) of float16, bfloat16 or float32; hidden is at most 16384.  ``out`` must
    be separate memory; ``residual_out`` may be ``residual``.  Raises InvalidArgumentError.

    The computation is vLLM's ``fused_add_rms_norm``.  s is the sum, with the bits of
    ``reduce_chunks``, and x = s + residual in fp32.  The new residual is x rounded to the dtype.
    normed uses x before rounding, with a rounding after each of these steps:

    * x * rsqrt(mean(x^2) + epsilon), rounded to weight's dtype;
    * times weight, rounded to weight's dtype;
    * rounded to the dtype.

    The new residual has the bits of the reference.  The error of an element of normed is at most
    (2 eps (1 + eps) + 2^-19) |reference| + 2 d max(1, |weight|); the reference has an exact mean.
    eps is the larger machine epsilon of the two dtypes, and d is the larger smallest positive
    number of the two dtypes.  The bound holds while the sum of squares is within fp32's range.

    Proof: a row sum is a tree of depth 32 + 9 at most.  The error of the mean is therefore at most
    44 units of 2^-24, and the error of x * factor at most 26 units, which gives 2^-19.  This error
    may change the rounding to weight's dtype by one eps, and the rounding after that by another.

    Bits of a row do not depend on other rows.  Every NaN written is the single quiet NaN.
    """
    check_rows(slots, residual, weight, arrival)
    residual_out = residual_target(residual_out, slots, residual, weight)
    if out is None:
        out = torch.empty_like(residual)
    else:
        check_like("out", out, residual.shape, (residual.dtype,), residual.device)
        check_apart(
            "out", out, slots=slots, residual=residual, weight=weight, residual_out=residual_out
        )
    hidden = residual.shape[-1]
    rows = residual.numel() // hidden
    if rows == 0:
        return out, residual_out
    block, warps = row_layout(hidden)
    sequence, arrived, abort, gave_up, wait = waiting(arrival, rows)
    _kernel[(rows,)](
        slots,
        residual,
        weight,
        out,
        residual_out,
        epsilon,
        slots.stride(0),
        slots.stride(1),
        sequence,
        arrived,
        abort,
        gave_up,
        WAIT=wait,
        RING=slots.shape[0],
        PEERS=slots.shape[1],
        HIDDEN=hidden,
        BLOCK=block,
        THREADS=32 * warps,
        num_warps=warps,
        **NO_FUSION,
    )
    return out, residual_out
