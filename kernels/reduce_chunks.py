"""The sum of peer slots: the arithmetic of an all-reduce with a rank per node, on the device."""

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
from r2serve.kernels.checks import FLOATS, check_apart, check_like, check_slots
from r2serve.kernels.formats import result
from r2serve.kernels.jit import NO_FUSION, jit
from r2serve.kernels.slots import sum_slots

# 8 elements per thread: a 16-byte load of a 16-bit format from each slot.
BLOCK = 1024
WARPS = 4


@jit
def _kernel(
    slots: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    ring_stride: tl.tensor,
    peer_stride: tl.tensor,
    sequence: tl.tensor,
    arrived: tl.tensor,
    abort: tl.tensor,
    gave_up: tl.tensor,
    WAIT: tl.constexpr,
    RING: tl.constexpr,
    PEERS: tl.constexpr,
    BLOCK: tl.constexpr,
    THREADS: tl.constexpr,
) -> None:
    if WAIT == BY_ITSELF:
        if not await_arrival(sequence, arrived, abort, THREADS):
            return
    elif WAIT == BEFORE:
        given_up = tl.load(gave_up)
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    first = slots + ring_offset(sequence, ring_stride, RING, WAIT)
    total = sum_slots(first, peer_stride, offsets, mask, PEERS)
    # Two nested ifs: the compiler evaluates the outer if, the kernel evaluates the inner if.
    if WAIT == BEFORE:  # noqa: SIM102
        if given_up != 0:
            return
    tl.store(out + offsets, result(total, out.dtype.element_ty), mask=mask)


def reduce_chunks(
    slots: torch.Tensor, *, out: torch.Tensor | None = None, arrival: Arrival | None = None
) -> torch.Tensor:
    """Returns the sum of the peers' slots in rank order, of shape ``slots.shape[2:]``.

    ``slots`` is (ring, peers, ...) of float16, bfloat16 or float32, with 1 to 16 peers; each slot
    is contiguous.  With an ``arrival``, the ring is a power of two, and the kernel waits for
    collective ``arrival.sequence`` and reads the entry of this number.  Without an ``arrival``, the
    ring is 1.  ``out`` is contiguous, of the slots' dtype.  Raises InvalidArgumentError.

    The result has the bits of the core's all-reduce with every rank on a separate node.  f16 and
    bf16 accumulate in fp32 and are rounded once, to nearest even; f32 accumulates in f32.
    Denormals and -0 are kept.  Every NaN is the positive quiet NaN without payload.
    """
    check_slots("slots", slots, FLOATS, arrival)
    if out is None:
        out = torch.empty(slots.shape[2:], dtype=slots.dtype, device=slots.device)
    else:
        check_like("out", out, slots.shape[2:], (slots.dtype,), slots.device)
        check_apart("out", out, slots=slots)
    count = out.numel()
    if count == 0:
        return out
    programs = -(-count // BLOCK)
    sequence, arrived, abort, gave_up, wait = waiting(arrival, programs)
    _kernel[(programs,)](
        slots,
        out,
        count,
        slots.stride(0),
        slots.stride(1),
        sequence,
        arrived,
        abort,
        gave_up,
        WAIT=wait,
        RING=slots.shape[0],
        PEERS=slots.shape[1],
        BLOCK=BLOCK,
        THREADS=32 * WARPS,
        num_warps=WARPS,
        **NO_FUSION,
    )
    return out
