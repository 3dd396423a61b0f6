"""Quantisation, the sum of quantised slots, and the error bound of both together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import DEVICE, DTYPES, normal, random_bits, same_bits

from r2serve.errors import InvalidArgumentError
from r2serve.kernels import reference
from r2serve.kernels.quantize_chunks import quantize_chunks
from r2serve.kernels.reduce_quantized_chunks import reduce_quantized_chunks

FP8, INT8 = torch.float8_e4m3fn, torch.int8
FORMATS = (FP8, INT8)
HALF_STEP = {FP8: 1 / 28, INT8: 1 / 254}  # h in the docstrings of the kernels


def spread(per_block: torch.Tensor, count: int, block: int) -> torch.Tensor:
    return per_block.repeat_interleave(block, dim=-1)[..., :count]


def largest_of(values: torch.Tensor, block: int) -> torch.Tensor:
    """Returns the largest magnitude of each element's block, in fp64; ``values`` is flat."""
    count = values.numel()
    padded = torch.nn.functional.pad(values.double(), (0, -count % block)).view(-1, block)
    return spread(padded.abs().amax(dim=-1), count, block)


def check(values: torch.Tensor, wire: torch.dtype, block: int = 128) -> None:
    codes, scales = quantize_chunks(values, wire, block=block)
    expected_codes, expected_scales = reference.quantize_chunks(values, wire, block)
    assert same_bits(scales, expected_scales)
    assert same_bits(codes, expected_codes)


@pytest.mark.parametrize("wire", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 3, 127, 128, 129, 1000, 1024, 1025])
def test_sizes(count: int, dtype: torch.dtype, wire: torch.dtype) -> None:
    check(normal((count,), dtype, count), wire)


@pytest.mark.parametrize("wire", FORMATS)
@pytest.mark.parametrize("block", [32, 64, 256, 1024])
def test_blocks(block: int, wire: torch.dtype) -> None:
    check(normal((3, 700), torch.float32), wire, block)


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(1, 600),
    block=st.sampled_from([32, 64, 128]),
    dtype=st.sampled_from(DTYPES),
    wire=st.sampled_from(FORMATS),
    seed=st.integers(0, 2**32 - 1),
)
def test_random_bits(
    count: int, block: int, dtype: torch.dtype, wire: torch.dtype, seed: int
) -> None:
    check(random_bits((count,), dtype, seed), wire, block)


@settings(max_examples=25, deadline=None)
@given(
    peers=st.integers(1, 16),
    count=st.integers(1, 300),
    exponent=st.integers(-150, 120),
    wire=st.sampled_from(FORMATS),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_error_is_within_the_bound(
    peers: int, count: int, exponent: int, wire: torch.dtype, seed: int
) -> None:
    """Magnitudes range from fp32 denormals to near fp32's maximum; the reference sum is in fp64."""
    values = normal((peers, count), torch.float32, seed).double() * 2.0**exponent
    values = values.float()
    made = [quantize_chunks(one, wire, block=32) for one in values]
    codes = torch.stack([codes for codes, _ in made])
    scales = torch.stack([scales for _, scales in made])
    total = reduce_quantized_chunks(codes[None], scales[None], torch.float32, block=32)
    assert same_bits(total, reference.reduce_quantized_chunks(codes, scales, torch.float32, 32))
    each = HALF_STEP[wire] + 2.0**-21 + peers * 2.0**-24
    allowed = sum(largest_of(one, 32) * each + 2.0**-123 for one in values)
    assert ((total.double() - values.double().sum(0)).abs() <= allowed).all()


@pytest.mark.parametrize(("wire", "worst"), [(FP8, 0.9), (INT8, 0.99)])
def test_the_bound_is_not_loose(wire: torch.dtype, worst: float) -> None:
    """The largest error over all elements is close to the bound; amax is 1."""
    values = torch.linspace(-1, 1, 31 * 1000, device=DEVICE).view(1000, 31)
    values = torch.cat([torch.ones(1000, 1, device=DEVICE), values], 1)
    codes, scales = reference.quantize_chunks(values, wire, 32)
    error = (codes.double() * scales.double()[:, None] - values.double()).abs()
    assert worst * HALF_STEP[wire] < error.max() <= HALF_STEP[wire] + 2.0**-21


@pytest.mark.parametrize("wire", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("peers", [1, 2, 3, 7, 16])
def test_the_sum(peers: int, dtype: torch.dtype, wire: torch.dtype) -> None:
    values = normal((peers, 5, 77), torch.bfloat16, peers)
    made = [reference.quantize_chunks(one, wire, 128) for one in values]
    codes = torch.stack([codes for codes, _ in made])
    scales = torch.stack([scales for _, scales in made])
    total = reduce_quantized_chunks(codes[None], scales[None], dtype)
    assert same_bits(total, reference.reduce_quantized_chunks(codes, scales, dtype, 128))


def test_peers_are_added_in_rank_order() -> None:
    for values, expected in (([1e8, -1e8, 1.0], 1.0), ([1.0, 1e8, -1e8], 0.0)):
        scales = torch.tensor(values, device=DEVICE).view(1, 3, 1)
        codes = torch.ones(1, 3, 1, dtype=INT8, device=DEVICE)
        assert reduce_quantized_chunks(codes, scales, torch.float32).item() == expected


@pytest.mark.parametrize("wire", FORMATS)
def test_zeros(wire: torch.dtype) -> None:
    codes, scales = quantize_chunks(torch.zeros(200, device=DEVICE), wire)
    assert not codes.view(torch.uint8).any()
    assert scales.tolist() == [2.0**-126] * 2
    total = reduce_quantized_chunks(codes[None, None], scales[None, None], torch.float16)
    assert same_bits(total, torch.zeros_like(total))
    codes, _ = quantize_chunks(-torch.zeros(200, device=DEVICE), wire)
    assert (codes.view(torch.uint8) == (0x80 if wire == FP8 else 0)).all()


@pytest.mark.parametrize("wire", FORMATS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_number_affects_only_its_block(bad: float, wire: torch.dtype) -> None:
    values = normal((384,), torch.bfloat16)
    values[200] = bad
    check(values, wire)
    codes, scales = quantize_chunks(values, wire)
    total = reduce_quantized_chunks(codes[None, None], scales[None, None], torch.float32)
    assert total[128:256].isnan().all()
    assert total[:128].isfinite().all()
    assert total[256:].isfinite().all()
    assert same_bits(total, reference.with_one_nan(total))


@pytest.mark.parametrize("wire", FORMATS)
def test_the_largest_number_is_met_exactly(wire: torch.dtype) -> None:
    values = torch.tensor([7.0, -7.0, 3.5, 0.0], device=DEVICE) * reference.LARGEST[wire]
    codes, scales = quantize_chunks(values, wire)
    assert scales.item() == 7.0
    assert codes[:2].float().tolist() == [reference.LARGEST[wire], -reference.LARGEST[wire]]


@pytest.mark.parametrize("wire", FORMATS)
def test_codes_and_scales_may_share_a_buffer(wire: torch.dtype) -> None:
    """On the wire, a slot holds the codes, then the scales."""
    count, blocks = 256, 2
    buffer = torch.zeros(1, 3, count + 4 * blocks, dtype=torch.uint8, device=DEVICE)
    codes = buffer[..., :count].view(wire)
    scales = buffer[..., count:].view(torch.float32)
    for peer in range(3):
        quantize_chunks(
            normal((count,), torch.float32, peer),
            wire,
            out=codes[0, peer],
            scales_out=scales[0, peer],
        )
    total = reduce_quantized_chunks(codes, scales, torch.float32)
    assert same_bits(
        total, reference.reduce_quantized_chunks(codes[0], scales[0], torch.float32, 128)
    )


def test_results_are_written_into_given_outputs() -> None:
    values = normal((130,), torch.float16)
    out = torch.empty(130, dtype=INT8, device=DEVICE)
    scales = torch.empty(2, device=DEVICE)
    made = quantize_chunks(values, INT8, out=out, scales_out=scales)
    assert made[0] is out
    assert made[1] is scales
    total = torch.empty(130, device=DEVICE)
    assert (
        reduce_quantized_chunks(out[None, None], scales[None, None], torch.float32, out=total)
        is total
    )


def test_nothing_to_quantise_is_no_error() -> None:
    codes, scales = quantize_chunks(torch.empty(0, 3, device=DEVICE))
    assert codes.shape == (0, 3)
    assert scales.shape == (0,)
    total = reduce_quantized_chunks(codes[None, None], scales[None, None], torch.float16)
    assert total.shape == (0, 3)


V, C = torch.zeros(256, device=DEVICE), torch.zeros(1, 2, 256, dtype=INT8, device=DEVICE)
SCALES = torch.zeros(1, 2, 2, device=DEVICE)
REFUSED = {
    "dtype of values": (
        lambda: quantize_chunks(V.double()),
        "values: dtype torch.float64 is none of float16, bfloat16, float32",
    ),
    "strides of values": (
        lambda: quantize_chunks(V[::2]),
        r"values: shape \(128,\), strides \(2,\) is not contiguous",
    ),
    "wire": (
        lambda: quantize_chunks(V, torch.float8_e5m2),
        "dtype: torch.float8_e5m2 is none of float8_e4m3fn, int8",
    ),
    "block": (
        lambda: quantize_chunks(V, block=96),
        "block: 96 is not a power of two from 32 to 1024",
    ),
    "large block": (lambda: quantize_chunks(V, block=2048), "block: 2048 is not"),
    "small block": (lambda: reduce_quantized_chunks(C, SCALES, FP8, block=16), "block: 16 is not"),
    "dtype of out": (
        lambda: quantize_chunks(V, FP8, out=torch.zeros(256, dtype=INT8, device=DEVICE)),
        r"out: \(256,\) of torch.int8 where \(256,\) of float8_e4m3fn is needed",
    ),
    "shape of scales_out": (
        lambda: quantize_chunks(V, scales_out=V[:3].clone()),
        r"scales_out: \(3,\) of torch.float32 where \(2,\) of float32 is needed",
    ),
    "scales_out over values": (
        lambda: quantize_chunks(V, scales_out=V[:2]),
        "scales_out: overlaps values in memory",
    ),
    "dtype of codes": (
        lambda: reduce_quantized_chunks(C.short(), SCALES, torch.float32),
        "codes: dtype torch.int16 is none of float8_e4m3fn, int8",
    ),
    "dtype of scales": (
        lambda: reduce_quantized_chunks(C, SCALES.half(), torch.float32),
        "scales: dtype torch.float16 is none of float32",
    ),
    "shape of scales": (
        lambda: reduce_quantized_chunks(C, SCALES, torch.float32, block=64),
        r"scales: shape \(1, 2, 2\) where \(1, 2, 4\) is needed for blocks of 64",
    ),
    "dtype of the sum": (
        lambda: reduce_quantized_chunks(C, SCALES, FP8),
        "dtype: torch.float8_e4m3fn is none of float16, bfloat16, float32",
    ),
    "sum over codes": (
        lambda: reduce_quantized_chunks(
            C, SCALES, torch.float16, out=C.view(torch.float16).flatten()
        ),
        "out: overlaps codes in memory",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments_are_refused(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(InvalidArgumentError, match=message):
        call()
