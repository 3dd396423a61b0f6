"""Conversions inside kernels against PyTorch's conversions, exhaustive for small formats."""

from __future__ import annotations

import functools

import pytest
import torch
import triton
import triton.language as tl
from inputs import DEVICE, from_bits, random_bits, same_bits

from r2serve.kernels import reference
from r2serve.kernels.checks import native_fp8
from r2serve.kernels.formats import from_e4m3, from_int8, result, to_e4m3, to_int8, widen

BLOCK = 4096


# Functions are jitted inside a test, because Triton decides at this time whether to interpret.
jit = functools.cache(triton.jit)
NATIVES = [False, True] if native_fp8(DEVICE) else [False]


def _through_fp32(source, target, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    x = widen(tl.load(source + offsets, mask=mask, other=0.0))
    tl.store(target + offsets, result(x, target.dtype.element_ty), mask=mask)


def _to_codes(source, target, count, FP8: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    x = tl.load(source + offsets, mask=mask, other=0.0)
    code = to_e4m3(x, NATIVE) if FP8 else to_int8(x)
    tl.store(target + offsets, code, mask=mask)


def _from_codes(source, target, FP8: tl.constexpr, NATIVE: tl.constexpr):
    offsets = tl.arange(0, 256)
    code = tl.load(source + offsets)
    x = from_e4m3(code, NATIVE) if FP8 else from_int8(code)
    tl.store(target + offsets, x)


def convert(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    target = torch.empty(source.shape, dtype=dtype, device=DEVICE)
    count = source.numel()
    jit(_through_fp32)[(-(-count // BLOCK),)](source, target, count, BLOCK=BLOCK)
    return target


def codes(source: torch.Tensor, dtype: torch.dtype, native: bool = False) -> torch.Tensor:
    target = torch.empty(source.shape, dtype=torch.uint8, device=DEVICE)
    count = source.numel()
    fp8 = dtype == torch.float8_e4m3fn
    jit(_to_codes)[(-(-count // BLOCK),)](
        source, target, count, FP8=fp8, NATIVE=native, BLOCK=BLOCK
    )
    return target.view(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_survive_fp32(dtype: torch.dtype) -> None:
    """Every number survives, including denormals and signs; every NaN becomes the quiet NaN."""
    every = from_bits(tuple(range(2**16)), dtype)
    assert same_bits(convert(every, torch.float32), reference.with_one_nan(every.float()))
    assert same_bits(convert(every, dtype), reference.with_one_nan(every))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp32_is_rounded_to_nearest_even(dtype: torch.dtype) -> None:
    """Inputs are random numbers, every tie between neighbours, and numbers just beside the ties."""
    every = from_bits(tuple(range(2**15)), dtype).float()
    every = every[every.isfinite()]
    ties = (every[:-1].double() + every[1:].double()).div(2).float()
    step = torch.nextafter(ties, torch.full_like(ties, torch.inf))
    back = torch.nextafter(ties, torch.zeros_like(ties))
    whole = torch.cat([ties, -ties, step, back, random_bits((4096,), torch.float32)])
    assert same_bits(convert(whole, dtype), reference.with_one_nan(whole.to(dtype)))


@pytest.mark.parametrize("native", NATIVES)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_every_code_is_decoded(dtype: torch.dtype, native: bool) -> None:
    every = from_bits(tuple(range(256)), torch.uint8)
    target = torch.empty(256, device=DEVICE)
    jit(_from_codes)[(1,)](every, target, FP8=dtype == torch.float8_e4m3fn, NATIVE=native)
    expected = every.view(dtype).to(torch.float32)
    assert same_bits(reference.with_one_nan(target), reference.with_one_nan(expected))


@pytest.mark.parametrize("native", NATIVES)
def test_e4m3_is_rounded_to_nearest_even_and_clamped(native: bool) -> None:
    every = from_bits(tuple(range(0x7F)), torch.float8_e4m3fn).float()
    ties = (every[:-1] + every[1:]) / 2
    step = torch.nextafter(ties, torch.full_like(ties, torch.inf))
    back = torch.nextafter(ties, torch.zeros_like(ties))
    above = torch.tensor([449.0, 464.0, 480.0, 1e30, torch.inf], device=DEVICE)
    whole = torch.cat([every, ties, step, back, above, random_bits((4096,), torch.float32)])
    whole = torch.cat([whole, -whole])
    clamped = whole.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    expected = torch.where(whole.isnan(), 0x7F, clamped.int()).to(torch.uint8)
    assert same_bits(codes(whole, torch.float8_e4m3fn, native).view(torch.uint8), expected)


def test_int8_is_rounded_to_nearest_even() -> None:
    halves = torch.arange(-254, 255, device=DEVICE) / 2
    step = torch.nextafter(halves, torch.full_like(halves, torch.inf)).clamp(max=127.0)
    whole = torch.cat([halves, step, torch.tensor([-0.0, 1e-45, torch.nan], device=DEVICE)])
    expected = torch.where(whole.isnan(), 0.0, whole.round()).to(torch.int8)
    assert same_bits(codes(whole, torch.int8), expected)
