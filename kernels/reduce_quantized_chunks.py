"""The sum of peer slots with quantised values: the counterpart of ``quantize_chunks``."""

from __future__ import annotations

import torch
import triton.language as tl

from r2serve.errors import InvalidArgumentError
from r2serve.kernels.arrival import (
    BEFORE,
    BY_ITSELF,
    Arrival,
    await_arrival,
    ring_offset,
    waiting,
)
from r2serve.kernels.checks import (
    FLOATS,
    check_apart,
    check_like,
    check_slots,
    names,
    native_fp8,
)
from r2serve.kernels.formats import from_e4m3, from_int8, result
from r2serve.kernels.jit import NO_FUSION, jit
from r2serve.kernels.quantize_chunks import (
    DEFAULT_BLOCK,
    LARGEST,
    TILE,
    WARPS,
    check_block,
)


@jit
def _values(
    codes: tl.tensor,
    scales: tl.tensor,
    mask: tl.tensor,
    has_scale: tl.tensor,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
) -> tl.tensor:
    """Returns the dequantised tile of a peer, in fp32."""
    code = tl.load(codes, mask=mask, other=0, cache_modifier=".cg")
    scale = tl.load(scales, mask=has_scale, other=0.0, cache_modifier=".cg")
    value = from_e4m3(code, NATIVE) if FP8 else from_int8(code)
    return value * scale[:, None]


@jit
def _kernel(
    codes: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    ring_stride: tl.tensor,
    peer_stride: tl.tensor,
    scales_ring_stride: tl.tensor,
    scales_peer_stride: tl.tensor,
    sequence: tl.tensor,
    arrived: tl.tensor,
    abort: tl.tensor,
    gave_up: tl.tensor,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
    WAIT: tl.constexpr,
    RING: tl.constexpr,
    PEERS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    THREADS: tl.constexpr,
) -> None:
    if WAIT == BY_ITSELF:
        if not await_arrival(sequence, arrived, abort, THREADS):
            return
    elif WAIT == BEFORE:
        given_up = tl.load(gave_up)
    blocks = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offsets = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = offsets < count
    has_scale = blocks * BLOCK < count
    code = codes + ring_offset(sequence, ring_stride, RING, WAIT) + offsets
    scale = scales + ring_offset(sequence, scales_ring_stride, RING, WAIT) + blocks
    total = _values(code, scale, mask, has_scale, FP8, NATIVE)
    for _ in tl.static_range(1, PEERS):
        code += peer_stride
        scale += scales_peer_stride
        total += _values(code, scale, mask, has_scale, FP8, NATIVE)
    # Two nested ifs: the compiler evaluates the outer if, the kernel evaluates the inner if.
    if WAIT == BEFORE:  # noqa: SIM102
        if given_up != 0:
            return
    tl.store(out + offsets, result(total, out.dtype.element_ty), mask=mask)


def reduce_quantized_chunks(
    codes: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
    *,
    block: int = DEFAULT_BLOCK,
    out: torch.Tensor | None = None,
    arrival: Arrival | None = None,
) -> torch.Tensor:
    """Returns the sum of the peers' dequantised slots in rank order.

    The result has the shape ``codes.shape[2:]`` and the dtype ``dtype``.

    ``codes`` is (ring, peers, ...) of float8_e4m3fn or int8.  ``scales`` is (ring, peers, blocks)
    of float32.  Codes and scales have the layout of ``quantize_chunks`` with the same ``block``,
    and may be views of the same buffer.  ring, peers and ``arrival`` are as in ``reduce_chunks``.
    ``dtype`` is float16, bfloat16 or float32.  Raises InvalidArgumentError.

    A value is code * scale, rounded to fp32.  Values are added in rank order in fp32, without fused
    multiply-add.  The sum is rounded once to ``dtype``, to nearest even.  The result has the bits
    of the reference.

    Before the last rounding, the error against the exact sum of the peers' values is at most the
    sum over the peers of amax (h + 2^-21 + peers 2^-24) + 2^-123.  The bound covers quantisation,
    with h as in ``quantize_chunks``, and the additions.  Every NaN is the single quiet NaN.
    """
    check_slots("codes", codes, tuple(LARGEST), arrival)
    check_slots("scales", scales, (torch.float32,), arrival)
    check_block(block)
    if dtype not in FLOATS:
        raise InvalidArgumentError(f"dtype: {dtype} is none of {names(FLOATS)}")
    shape = codes.shape[2:]
    count = shape.numel()
    blocks = -(-count // block)
    wanted = (*codes.shape[:2], blocks)
    if tuple(scales.shape) != wanted:
        raise InvalidArgumentError(
            f"scales: shape {tuple(scales.shape)} where {wanted} is needed for blocks of {block}"
        )
    if scales.device != codes.device:
        raise InvalidArgumentError(f"scales: is on {scales.device}; it must be on {codes.device}")
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=codes.device)
    else:
        check_like("out", out, shape, (dtype,), codes.device)
        check_apart("out", out, codes=codes, scales=scales)
    if count == 0:
        return out
    rows = TILE // block
    programs = -(-blocks // rows)
    sequence, arrived, abort, gave_up, wait = waiting(arrival, programs)
    _kernel[(programs,)](
        codes.view(torch.uint8),
        scales,
        out,
        count,
        codes.stride(0),
        codes.stride(1),
        scales.stride(0),
        scales.stride(1),
        sequence,
        arrived,
        abort,
        gave_up,
        FP8=codes.dtype == torch.float8_e4m3fn,
        NATIVE=native_fp8(codes.device),
        WAIT=wait,
        RING=codes.shape[0],
        PEERS=codes.shape[1],
        ROWS=rows,
        BLOCK=block,
        THREADS=32 * WARPS,
        num_warps=WARPS,
        **NO_FUSION,
    )
    return out
