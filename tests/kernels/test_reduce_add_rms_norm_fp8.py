"""Codes and scales equal the quantised output of reduce_add_rms_norm."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import DEVICE, DTYPES, normal, same_bits

from r2serve.errors import InvalidArgumentError
from r2serve.kernels import reference
from r2serve.kernels.reduce_add_rms_norm import reduce_add_rms_norm
from r2serve.kernels.reduce_add_rms_norm_fp8 import reduce_add_rms_norm_fp8

EPSILON = 1e-5


def check(slots: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
    codes, scales, new = reduce_add_rms_norm_fp8(slots, residual, weight, EPSILON)
    normed, expected_new = reduce_add_rms_norm(slots, residual, weight, EPSILON)
    expected_codes, expected_scales = reference.quantise_rows(normed)
    assert same_bits(new, expected_new)
    assert same_bits(new, reference.reduce_add_rms_norm(slots[0], residual, weight, EPSILON)[1])
    largest = normed.float().abs().amax(dim=-1, keepdim=True)
    error = (codes.float() * scales - normed.float()).abs()
    promised = largest.isfinite() & (largest > 1 / 512)
    assert ((error <= largest * (1 / 28 + 2.0**-20)) | ~promised).all()
    if normed.is_cuda and normed.dtype == torch.float32:
        # The two kernels add squares in different orders; fp32 rows have no rounding to hide this.
        finite = expected_scales.isfinite()
        assert torch.equal(finite, scales.isfinite())
        off = (scales - expected_scales).abs() <= expected_scales * 2.0**-21
        assert (off | ~finite).all()
    else:
        assert same_bits(scales, expected_scales)
        assert same_bits(codes, expected_codes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 5, 129, 2880, 4096])
def test_sizes(hidden: int, dtype: torch.dtype) -> None:
    slots, residual = normal((1, 3, 2, hidden), dtype), normal((2, hidden), dtype, 1)
    check(slots, residual, normal((hidden,), dtype, 2))


@settings(max_examples=15, deadline=None)
@given(
    peers=st.integers(1, 16),
    rows=st.integers(1, 3),
    hidden=st.integers(1, 300),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    seed=st.integers(0, 2**32 - 1),
)
def test_random_shapes(
    peers: int, rows: int, hidden: int, dtypes: tuple[torch.dtype, torch.dtype], seed: int
) -> None:
    slots = normal((1, peers, rows, hidden), dtypes[0], seed)
    residual = normal((rows, hidden), dtypes[0], seed + 1)
    check(slots, residual, normal((hidden,), dtypes[1], seed + 2))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_number_affects_only_its_row(bad: float) -> None:
    slots, residual = normal((1, 2, 3, 65), torch.float16), normal((3, 65), torch.float16, 1)
    weight = normal((65,), torch.float16, 2)
    slots[0, 1, 1, 7] = bad
    check(slots, residual, weight)
    codes, scales, _ = reduce_add_rms_norm_fp8(slots, residual, weight, EPSILON)
    whole = codes.float() * scales
    assert whole[1].isnan().all()
    assert whole[::2].isfinite().all()


def test_infinity_alone_makes_the_scale_infinite() -> None:
    """A large weight makes an element exceed f16: the element's code is NaN, other codes are 0."""
    slots = torch.ones(1, 1, 1, 64, dtype=torch.float16, device=DEVICE)
    weight = torch.ones(64, device=DEVICE)
    weight[3] = 1e6
    codes, scales, _ = reduce_add_rms_norm_fp8(slots, slots[0, 0] * 0, weight, EPSILON)
    assert scales.isposinf().all()
    expected = torch.zeros(1, 64, dtype=torch.uint8, device=DEVICE)
    expected[0, 3] = 0x7F
    assert torch.equal(codes.view(torch.uint8), expected)
    check(slots, slots[0, 0] * 0, weight)


def test_a_row_of_zeros_has_the_smallest_scale() -> None:
    zeros = torch.zeros(1, 2, 1, 33, dtype=torch.bfloat16, device=DEVICE)
    weight = torch.ones(33, dtype=torch.bfloat16, device=DEVICE)
    codes, scales, _ = reduce_add_rms_norm_fp8(zeros, zeros[0, 0], weight, EPSILON)
    assert scales.item() == torch.tensor(1 / (448 * 512), dtype=torch.float32).item()
    assert not codes.view(torch.uint8).any()


def test_zero_epsilon_with_a_row_shorter_than_the_program() -> None:
    slots, residual = normal((1, 2, 1, 33), torch.bfloat16), normal((1, 33), torch.bfloat16, 1)
    weight = normal((33,), torch.bfloat16, 2)
    codes, scales, _ = reduce_add_rms_norm_fp8(slots, residual, weight, 0.0)
    normed, _ = reduce_add_rms_norm(slots, residual, weight, 0.0)
    assert same_bits(scales, reference.quantise_rows(normed)[1])
    assert same_bits(codes, reference.quantise_rows(normed)[0])


def test_in_place() -> None:
    slots, residual = normal((1, 2, 2, 33), torch.float16), normal((2, 33), torch.float16, 1)
    weight = normal((33,), torch.float16, 2)
    expected = reduce_add_rms_norm_fp8(slots, residual, weight, EPSILON)
    out, scales = torch.empty_like(expected[0]), torch.empty_like(expected[1])
    made = reduce_add_rms_norm_fp8(
        slots, residual, weight, EPSILON, out=out, scales_out=scales, residual_out=residual
    )
    assert made[0] is out
    assert made[1] is scales
    assert made[2] is residual
    assert all(same_bits(one, other) for one, other in zip(made, expected, strict=True))


def test_no_rows_is_no_error() -> None:
    empty = torch.empty(1, 2, 0, 8, device=DEVICE)
    codes, scales, _ = reduce_add_rms_norm_fp8(
        empty, empty[0, 0], torch.ones(8, device=DEVICE), EPSILON
    )
    assert codes.shape == (0, 8)
    assert scales.shape == (0, 1)


S, R = torch.zeros(1, 2, 3, 8, device=DEVICE), torch.zeros(3, 8, device=DEVICE)
W, MEMORY = torch.zeros(8, device=DEVICE), torch.zeros(24, device=DEVICE)
CODES = torch.zeros(3, 8, dtype=torch.float8_e4m3fn, device=DEVICE)
REFUSED = {
    "dtype of out": (
        lambda: reduce_add_rms_norm_fp8(S, R, W, EPSILON, out=R.clone()),
        r"out: \(3, 8\) of torch.float32 where \(3, 8\) of float8_e4m3fn is needed",
    ),
    "shape of scales_out": (
        lambda: reduce_add_rms_norm_fp8(S, R, W, EPSILON, scales_out=MEMORY[:3]),
        r"scales_out: \(3,\) of torch.float32 where \(3, 1\) of float32 is needed",
    ),
    "scales_out over residual_out": (
        lambda: reduce_add_rms_norm_fp8(
            S, R, W, EPSILON, scales_out=MEMORY[:3, None], residual_out=MEMORY.view(3, 8)
        ),
        "scales_out: overlaps residual_out in memory",
    ),
    "scales_out over out": (
        lambda: reduce_add_rms_norm_fp8(
            S,
            R,
            W,
            EPSILON,
            out=CODES,
            scales_out=CODES.view(torch.float32).flatten()[:3, None],
        ),
        "scales_out: overlaps out in memory",
    ),
    "out over residual": (
        lambda: reduce_add_rms_norm_fp8(
            S,
            R,
            W,
            EPSILON,
            out=R.view(torch.float8_e4m3fn).flatten()[:24].view(3, 8),
        ),
        "out: overlaps residual in memory",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments_are_refused(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(InvalidArgumentError, match=message):
        call()
