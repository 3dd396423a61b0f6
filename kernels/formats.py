"""Element formats inside kernels: exact widening, rounding to nearest even, one NaN.

These are the rules of the core's ``reduce_formats.hpp``.  Where the processor has an instruction
that follows them it is used; integers do the work where it has none, and under Triton's
interpreter, whose own casts of bf16 and fp8 round ties away from zero and lose denormals.
"""

from __future__ import annotations

import triton.language as tl

from r2serve.kernels.jit import INTERPRETED, jit

_REBIAS = tl.constexpr(2.0**120)  # from the exponent bias of fp32, 127, to that of e4m3, 7


@jit
def widen(x: tl.tensor) -> tl.tensor:
    """f16, bf16 or f32 as f32, exactly, denormals included."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        wide = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return wide.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@jit
def narrow(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """f32 as ``dtype``, to the nearest, ties to even.  NaN stays NaN, of unspecified bits."""
    if INTERPRETED and dtype == tl.bfloat16:
        exact = tl.where(x == x, x.to(tl.uint32, bitcast=True), 0x7FC00000)
        nearest = (exact + 0x7FFF + ((exact >> 16) & 1)) >> 16
        return nearest.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@jit
def result(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """f32 as ``dtype``, as ``narrow``; every NaN becomes the core's one quiet NaN."""
    if dtype == tl.float32:
        bits = tl.where(x == x, x.to(tl.uint32, bitcast=True), 0x7FC00000)
    elif dtype == tl.bfloat16:
        bits = tl.where(x == x, narrow(x, dtype).to(tl.uint16, bitcast=True), 0x7FC0)
        bits = bits.to(tl.uint16)
    else:
        bits = tl.where(x == x, narrow(x, dtype).to(tl.uint16, bitcast=True), 0x7E00)
        bits = bits.to(tl.uint16)
    return bits.to(dtype, bitcast=True)


@jit
def magnitude_bits(x: tl.tensor) -> tl.tensor:
    """|x| of an f32 as an integer.  They sort like the numbers, with infinity and then NaN on top,
    so that an integer maximum is exact and lets no NaN slip, which a float maximum may."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def scale_of(
    largest_bits: tl.tensor, FORMAT_LARGEST: tl.constexpr, SMALLEST_SCALE: tl.constexpr
) -> tl.tensor:
    """``max(largest / FORMAT_LARGEST, SMALLEST_SCALE)``, where a NaN stays (the one quiet NaN)."""
    scale = tl.div_rn(largest_bits.to(tl.float32, bitcast=True), FORMAT_LARGEST)
    return result(tl.where(scale < SMALLEST_SCALE, SMALLEST_SCALE, scale), tl.float32)


@jit
def to_e4m3(x: tl.tensor, NATIVE: tl.constexpr) -> tl.tensor:
    """f32 as bytes of e4m3fn: nearest, ties to even, clamped to +-448; NaN is 0x7f."""
    if NATIVE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        exact = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # 448
        # Keep 3 bits of mantissa; rebias the exponent by 127 - 7.
        normal = ((exact + 0x7FFFF + ((exact >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6 the result counts units of 2^-9, which is the last place of fp32 at 2^14.
        shifted = exact.to(tl.float32, bitcast=True) + 16384.0
        denormal = shifted.to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(exact < 0x3C800000, denormal, normal) | ((bits >> 24) & 0x80)
        return tl.where(x == x, code, 0x7F).to(tl.uint8)


@jit
def from_e4m3(code: tl.tensor, NATIVE: tl.constexpr) -> tl.tensor:
    """Bytes of e4m3fn as f32, exactly."""
    if NATIVE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        wide = code.to(tl.int32)
        # The exponent is rebiased by a product, which makes denormals normal on the way.
        size = ((wide & 0x7F) << 20).to(tl.float32, bitcast=True) * _REBIAS
        bits = size.to(tl.int32, bitcast=True) | ((wide & 0x80) << 24)
        bits = tl.where((wide & 0x7F) == 0x7F, 0x7FC00000, bits)
        return bits.to(tl.float32, bitcast=True)


@jit
def to_int8(x: tl.tensor) -> tl.tensor:
    """f32 of at most 127 in magnitude as bytes of int8: nearest, ties to even; NaN is 0."""
    # Integers are the last place of fp32 at 1.5 * 2^23.
    shifted = tl.where(x == x, x, 0.0) + 12582912.0
    return ((shifted.to(tl.int32, bitcast=True) - 0x4B400000) & 0xFF).to(tl.uint8)


@jit
def from_int8(code: tl.tensor) -> tl.tensor:
    """Bytes of int8 as f32, exactly."""
    return code.to(tl.int8, bitcast=True).to(tl.float32)
