"""Quantisation to bytes with a scale per block: the optional wire format, off by default."""

from __future__ import annotations

import torch
import triton.language as tl

from r2serve.errors import InvalidArgumentError
from r2serve.kernels.checks import (
    FLOATS,
    check_apart,
    check_dtype,
    check_like,
    check_place,
    native_fp8,
)
from r2serve.kernels.formats import (
    magnitude_bits,
    scale_of,
    to_e4m3,
    to_int8,
    widen,
)
from r2serve.kernels.jit import NO_FUSION, jit

# The largest number of each wire format.
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
# Smallest normal number of fp32.  The reciprocal is finite, so zeros give codes of zero.
SMALLEST_SCALE = 2.0**-126
DEFAULT_BLOCK = 128
# Elements (whole blocks) and warps of a program: 8 elements per thread.
TILE = 1024
WARPS = 4


@jit
def _kernel(
    values: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    count: tl.tensor,
    LARGEST: tl.constexpr,
    SMALLEST_SCALE: tl.constexpr,
    FP8: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    blocks = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offsets = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = offsets < count
    x = widen(tl.load(values + offsets, mask=mask, other=0.0))
    scale = scale_of(tl.max(magnitude_bits(x), axis=1), LARGEST, SMALLEST_SCALE)
    scaled = x * tl.div_rn(1.0, scale)[:, None]
    code = to_e4m3(scaled, NATIVE) if FP8 else to_int8(scaled)
    tl.store(codes + offsets, code, mask=mask)
    tl.store(scales + blocks, scale, mask=blocks * BLOCK < count)


def check_block(block: int) -> None:
    if not 32 <= block <= TILE or block & (block - 1):
        raise InvalidArgumentError(f"block: {block} is not a power of two from 32 to {TILE}")


def quantize_chunks(
    values: torch.Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    block: int = DEFAULT_BLOCK,
    out: torch.Tensor | None = None,
    scales_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises blocks of ``block`` elements; returns (codes, scales).

    ``values`` is contiguous, of any shape, of float16, bfloat16 or float32.  ``dtype`` is
    float8_e4m3fn or int8.  ``block`` is a power of two from 32 to 1024; the last block may be
    shorter.  ``out`` has the shape of ``values``, ``scales_out`` is (blocks,) of float32; both must
    be separate memory.  Raises InvalidArgumentError.

    The scale of a block is max(amax / L, 2^-126), with L = 448 for e4m3fn and L = 127 for int8.
    Codes are x * (1 / scale), in fp32, rounded to nearest even.

    The error |code * scale - x| is at most amax (h + 2^-21) + 2^-123.  h is half of the largest
    step: 1/28 for e4m3fn, 1/254 for int8.  2^-21 is the error of five roundings in fp32, and 2^-123
    is the error of the smallest scale.  (A number within 2^-22 of fp32's largest number may
    dequantise to infinity.)

    A block of zeros has codes of zero (e4m3fn keeps the sign of -0, int8 does not).  A block with
    NaN or infinity has a NaN or infinite scale, and every element dequantises to NaN.  Neighbouring
    blocks are not affected.
    """
    check_dtype("values", values, FLOATS)
    check_place("values", values)
    check_block(block)
    if dtype not in LARGEST:
        raise InvalidArgumentError(f"dtype: {dtype} is none of float8_e4m3fn, int8")
    check_like("values", values, values.shape, FLOATS, values.device)
    count = values.numel()
    blocks = -(-count // block)
    if out is None:
        out = torch.empty(values.shape, dtype=dtype, device=values.device)
    else:
        check_like("out", out, values.shape, (dtype,), values.device)
        check_apart("out", out, values=values)
    if scales_out is None:
        scales_out = torch.empty(blocks, dtype=torch.float32, device=values.device)
    else:
        check_like("scales_out", scales_out, (blocks,), (torch.float32,), values.device)
        check_apart("scales_out", scales_out, values=values, out=out)
    if count == 0:
        return out, scales_out
    rows = TILE // block
    _kernel[(-(-blocks // rows),)](
        values,
        out.view(torch.uint8),
        scales_out,
        count,
        LARGEST=LARGEST[dtype],
        SMALLEST_SCALE=SMALLEST_SCALE,
        FP8=dtype == torch.float8_e4m3fn,
        NATIVE=native_fp8(values.device),
        ROWS=rows,
        BLOCK=block,
        num_warps=WARPS,
        **NO_FUSION,
    )
    return out, scales_out
