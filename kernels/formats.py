"""Element formats inside kernels: exact widening, rounding to nearest even, a single NaN.

The rules are the rules of the core's ``reduce_formats.hpp``.  Kernels use the device's conversion
instruction if the instruction follows the rules, else integer arithmetic.  Under Triton's
interpreter, bf16 and fp8 always use integer arithmetic, because the interpreter's casts round ties
away from zero and lose denormals.
"""

from __future__ import annotations

import triton.language as tl

from r2serve.kernels.jit import INTERPRETED, jit

_REBIAS = tl.constexpr(2.0**120)  # 2^(127 - 7): changes e4m3's exponent bias 7 to fp32's 127


@jit
def widen(x: tl.tensor) -> tl.tensor:
    """Converts f16, bf16 or f32 to f32, exactly, including denormals."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        wide = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return wide.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@jit
def narrow(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Converts f32 to ``dtype``: nearest, ties to even.  NaN stays NaN, with unspecified bits."""
    if INTERPRETED and dtype == tl.bfloat16:
        exact = tl.where(x == x, x.to(tl.uint32, bitcast=True), 0x7FC00000)
        nearest = (exact + 0x7FFF + ((exact >> 16) & 1)) >> 16
        return nearest.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@jit
def result(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Converts f32 to ``dtype``, like ``narrow``; every NaN becomes the core's single quiet NaN."""
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
    """Returns the bits of |x| of an f32 as an integer.

    The integers sort like the numbers, with infinity and then NaN at the top.  An integer maximum
    is therefore exact and keeps NaN; a float maximum may lose NaN.
    """
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def scale_of(
    largest_bits: tl.tensor, FORMAT_LARGEST: tl.constexpr, SMALLEST_SCALE: tl.constexpr
) -> tl.tensor:
    """Returns ``max(largest / FORMAT_LARGEST, SMALLEST_SCALE)``; NaN gives the single quiet NaN."""
    scale = tl.div_rn(largest_bits.to(tl.float32, bitcast=True), FORMAT_LARGEST)
    return result(tl.where(scale < SMALLEST_SCALE, SMALLEST_SCALE, scale), tl.float32)


@jit
def to_e4m3(x: tl.tensor, NATIVE: tl.constexpr) -> tl.tensor:
    """Converts f32 to bytes of e4m3fn: nearest, ties to even, clamped to +-448; NaN is 0x7f."""
    if NATIVE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        exact = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # 448
        # Normal numbers: keep 3 bits of mantissa; rebias the exponent by 127 - 7.
        normal = ((exact + 0x7FFFF + ((exact >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6, the code counts units of 2^-9.  Adding 2^14 rounds to this unit in fp32.
        shifted = exact.to(tl.float32, bitcast=True) + 16384.0
        denormal = shifted.to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(exact < 0x3C800000, denormal, normal) | ((bits >> 24) & 0x80)
        return tl.where(x == x, code, 0x7F).to(tl.uint8)


@jit
def from_e4m3(code: tl.tensor, NATIVE: tl.constexpr) -> tl.tensor:
    """Converts bytes of e4m3fn to f32, exactly."""
    if NATIVE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        wide = code.to(tl.int32)
        # The multiplication rebiases the exponent, and normalises denormals.
        size = ((wide & 0x7F) << 20).to(tl.float32, bitcast=True) * _REBIAS
        bits = size.to(tl.int32, bitcast=True) | ((wide & 0x80) << 24)
        bits = tl.where((wide & 0x7F) == 0x7F, 0x7FC00000, bits)
        return bits.to(tl.float32, bitcast=True)


@jit
def to_int8(x: tl.tensor) -> tl.tensor:
    """Converts f32 of magnitude up to 127 to bytes of int8: nearest, ties to even; NaN is 0."""
    # Adding 1.5 * 2^23 rounds to integers in fp32.
    shifted = tl.where(x == x, x, 0.0) + 12582912.0
    return ((shifted.to(tl.int32, bitcast=True) - 0x4B400000) & 0xFF).to(tl.uint8)


@jit
def from_int8(code: tl.tensor) -> tl.tensor:
    """Converts bytes of int8 to f32, exactly."""
    return code.to(tl.int8, bitcast=True).to(tl.float32)
