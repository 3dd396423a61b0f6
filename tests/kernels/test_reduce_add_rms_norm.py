"""The fused kernel equals a sum, an addition and an RMSNorm in sequence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import DEVICE, DTYPES, hard_pairs, normal, random_bits, same_bits

from r2serve.errors import InvalidArgumentError
from r2serve.kernels import reference
from r2serve.kernels.reduce_add_rms_norm import reduce_add_rms_norm
from r2serve.kernels.reduce_chunks import reduce_chunks
from r2serve.kernels.rms_norm import row_layout

EPSILON = 1e-5


def bound(expected: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns the error bound of each element, from the docstring of reduce_add_rms_norm."""
    both = [torch.finfo(dtype) for dtype in (expected.dtype, weight.dtype)]
    eps = max(one.eps for one in both)
    smallest = max(one.smallest_normal * one.eps for one in both)
    relative = (2 * eps * (1 + eps) + 2.0**-19) * expected.double().abs()
    return relative + 2 * smallest * weight.double().abs().clamp(min=1)


def check(slots: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> float:
    """Compares with the reference; returns the fraction of normed elements with equal bits."""
    normed, new = reduce_add_rms_norm(slots, residual, weight, EPSILON)
    expected, expected_new = reference.reduce_add_rms_norm(slots[0], residual, weight, EPSILON)
    assert same_bits(new, expected_new)
    assert normed.dtype == expected.dtype
    assert torch.equal(normed.isnan(), expected.isnan())
    assert same_bits(reference.with_one_nan(normed), normed)
    numbers = expected.isfinite() & normed.isfinite()
    assert torch.equal(normed[~numbers & ~expected.isnan()], expected[~numbers & ~expected.isnan()])
    error = (normed.double() - expected.double()).abs()
    assert (error <= bound(expected, weight))[numbers].all()
    same = (reference.bits(normed) == reference.bits(expected)).float().mean().item()
    return same


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    slots, residual = normal((1, 3, 2, 1000), dtype), normal((2, 1000), dtype, 1)
    same = check(slots, residual, normal((1000,), weight_dtype, 2))
    coarse = torch.float32 not in (dtype, weight_dtype)
    assert same > (0.99 if coarse else 0.4)  # a wrong rounding would change many elements


@pytest.mark.parametrize("peers", range(1, 17))
def test_every_number_of_peers(peers: int) -> None:
    slots, residual = normal((1, peers, 1, 129), torch.bfloat16), normal((1, 129), torch.bfloat16)
    check(slots, residual, normal((129,), torch.bfloat16))


@pytest.mark.parametrize("hidden", [1, 3, 5, 127, 128, 2880, 4096, 8192, 16384])
def test_hidden_sizes(hidden: int) -> None:
    slots, residual = normal((1, 2, 1, hidden), torch.bfloat16), normal((1, hidden), torch.bfloat16)
    check(slots, residual, normal((hidden,), torch.bfloat16))


@settings(max_examples=25, deadline=None)
@given(
    peers=st.integers(1, 16),
    rows=st.lists(st.integers(1, 3), min_size=0, max_size=2),
    hidden=st.integers(1, 300),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    seed=st.integers(0, 2**32 - 1),
)
def test_random_shapes(
    peers: int,
    rows: list[int],
    hidden: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    seed: int,
) -> None:
    slots = normal((1, peers, *rows, hidden), dtypes[0], seed)
    residual = normal((*rows, hidden), dtypes[0], seed + 1)
    check(slots, residual, normal((hidden,), dtypes[1], seed + 2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_new_residual_of_any_bits(dtype: torch.dtype) -> None:
    """The residual is elementwise: hard numbers and NaN in a row do not affect other elements."""
    slots = torch.cat([hard_pairs(dtype), random_bits((2, 40), dtype)], 1)[None, :, :100, None]
    residual = random_bits((slots.shape[2], 1), dtype, 1)
    weight = torch.ones(1, dtype=dtype, device=DEVICE)
    # Few long rows, because the interpreter is slow with many programs.
    for shape in ((1, -1), (5, -1)):
        laid = slots.reshape(1, 2, *shape).contiguous()
        old, gain = residual.view(shape), weight.expand(laid.shape[-1]).contiguous()
        _, new = reduce_add_rms_norm(laid, old, gain, EPSILON)
        assert same_bits(new, reference.reduce_add_rms_norm(laid[0], old, gain, EPSILON)[1])


def test_the_sum_is_rounded_before_the_residual_is_added() -> None:
    """The result equals a separate all-reduce: 1 + 2^-8 is a tie, and the sum rounds down to 1."""
    dtype = torch.bfloat16
    slots = torch.tensor([1.0, 2.0**-8], dtype=dtype, device=DEVICE).view(1, 2, 1, 1)
    residual = torch.tensor([[2.0**-8]], dtype=dtype, device=DEVICE)
    ones = torch.ones(1, dtype=dtype, device=DEVICE)
    _, new = reduce_add_rms_norm(slots, residual, ones, EPSILON)
    assert new.item() == 1.0  # the unrounded sum would give 1 + 2^-7
    assert reduce_chunks(slots).item() == 1.0


def test_the_unrounded_sum_is_normalised() -> None:
    """x is 1 + 1.5 * 2^-9, and the rounded residual is 1: x must be divided by the RMS of x."""
    dtype = torch.bfloat16
    slots = torch.ones(1, 1, 1, 64, dtype=dtype, device=DEVICE)
    residual = torch.full((1, 64), 1.5 * 2.0**-9, dtype=dtype, device=DEVICE)
    # An fp32 weight just below the tie between 1 and 1 + 2^-7: a factor above 1 crosses the tie.
    weight = torch.full((64,), 1.0 + 2.0**-8 - 2.0**-12, device=DEVICE)
    normed, new = reduce_add_rms_norm(slots, residual, weight, 0.0)
    assert torch.equal(new, torch.ones_like(new))
    assert torch.equal(normed, torch.ones_like(normed))


def test_epsilon_is_added_to_the_mean() -> None:
    zeros = torch.zeros(1, 1, 1, 16, device=DEVICE)
    ones = torch.ones(16, device=DEVICE)
    normed, _ = reduce_add_rms_norm(zeros, torch.full((1, 16), 0.5, device=DEVICE), ones, 0.75)
    assert torch.equal(normed, torch.full_like(normed, 0.5))
    normed, _ = reduce_add_rms_norm(zeros, zeros[0, 0], ones, 1e-6)
    assert torch.equal(normed, zeros[0, 0])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_number_affects_only_the_normed_row(bad: float) -> None:
    slots, residual = normal((1, 2, 3, 65), torch.bfloat16), normal((3, 65), torch.bfloat16, 1)
    weight = normal((65,), torch.bfloat16, 2)
    clean, _ = reduce_add_rms_norm(slots, residual, weight, EPSILON)
    slots[0, 1, 1, 7] = bad
    check(slots, residual, weight)
    normed, _ = reduce_add_rms_norm(slots, residual, weight, EPSILON)
    assert same_bits(normed[::2], clean[::2])


def test_a_row_has_the_same_bits_beside_any_rows() -> None:
    slots, residual = normal((1, 2, 5, 300), torch.bfloat16), normal((5, 300), torch.bfloat16, 1)
    weight = normal((300,), torch.float32, 2)
    together, _ = reduce_add_rms_norm(slots, residual, weight, EPSILON)
    alone, _ = reduce_add_rms_norm(slots[:, :, 3:4], residual[3:4], weight, EPSILON)
    assert same_bits(together[3:4], alone)


def test_in_place() -> None:
    slots, residual = normal((1, 2, 2, 33), torch.float16), normal((2, 33), torch.float16, 1)
    weight, out = normal((33,), torch.float16, 2), torch.empty_like(residual)
    expected = reduce_add_rms_norm(slots, residual, weight, EPSILON)
    normed, new = reduce_add_rms_norm(
        slots, residual, weight, EPSILON, out=out, residual_out=residual
    )
    assert normed is out
    assert new is residual
    assert same_bits(out, expected[0])
    assert same_bits(residual, expected[1])


@pytest.mark.parametrize(
    ("hidden", "layout"),
    [(1, (32, 1)), (512, (512, 1)), (2880, (4096, 8)), (8192, (8192, 16)), (16384, (16384, 16))],
)
def test_layout(hidden: int, layout: tuple[int, int]) -> None:
    assert row_layout(hidden) == layout


def test_no_rows_is_no_error() -> None:
    empty = torch.empty(1, 2, 0, 8, device=DEVICE)
    normed, new = reduce_add_rms_norm(empty, empty[0, 0], torch.ones(8, device=DEVICE), EPSILON)
    assert normed.shape == new.shape == (0, 8)


def test_vllm_has_the_same_definition() -> None:
    layernorm = pytest.importorskip("vllm.ir.ops.layernorm")
    slots, residual = normal((1, 3, 2, 500), torch.bfloat16), normal((2, 500), torch.bfloat16, 1)
    for dtype in (torch.bfloat16, torch.float32):
        weight = normal((500,), dtype, 2)
        ours = reduce_add_rms_norm(slots, residual, weight, EPSILON)
        native = layernorm.fused_add_rms_norm.impls["native"].impl_fn
        theirs = native(reduce_chunks(slots), residual, weight, EPSILON)
        assert same_bits(ours[1], theirs[1])
        error = (ours[0].double() - theirs[0].double()).abs()
        assert (error <= bound(theirs[0], weight)).all()


S, R, W = torch.zeros(1, 2, 3, 8), torch.zeros(3, 8), torch.zeros(8)
S, R, W = S.to(DEVICE), R.to(DEVICE), W.to(DEVICE)
WIDE = torch.zeros(1, 1, 1, 16385, device=DEVICE)
MEMORY = torch.zeros(80, device=DEVICE)
REFUSED = {
    "shape of residual": (
        lambda: reduce_add_rms_norm(S, R[:2], W, EPSILON),
        r"residual: \(2, 8\) of torch.float32 where \(3, 8\) of float32 is needed",
    ),
    "dtype of residual": (
        lambda: reduce_add_rms_norm(S, R.half(), W, EPSILON),
        r"residual: \(3, 8\) of torch.float16 where",
    ),
    "strides of residual": (
        lambda: reduce_add_rms_norm(S, torch.zeros(8, 3, device=DEVICE).t(), W, EPSILON),
        r"residual: shape \(3, 8\), strides \(1, 3\) is not contiguous",
    ),
    "shape of weight": (
        lambda: reduce_add_rms_norm(S, R, W[:7], EPSILON),
        r"weight: \(7,\) of torch.float32 where \(8,\) of float16, bfloat16, float32 is needed",
    ),
    "dtype of weight": (
        lambda: reduce_add_rms_norm(S, R, W.double(), EPSILON),
        r"weight: \(8,\) of torch.float64 where",
    ),
    "hidden": (
        lambda: reduce_add_rms_norm(WIDE, WIDE[0, 0], WIDE[0, 0, 0], EPSILON),
        "has a hidden size of 16385; it must be 1 to 16384",
    ),
    "no hidden": (
        lambda: reduce_add_rms_norm(S[..., :0], R[:, :0], W[:0], EPSILON),
        "has a hidden size of 0; it must be 1 to 16384",
    ),
    "ring": (
        lambda: reduce_add_rms_norm(S.expand(2, 2, 3, 8), R, W, EPSILON),
        "has a ring of 2; without an arrival it must be 1",
    ),
    "shape of out": (
        lambda: reduce_add_rms_norm(S, R, W, EPSILON, out=R[:2].clone()),
        r"out: \(2, 8\) of torch.float32 where \(3, 8\)",
    ),
    "out over residual": (
        lambda: reduce_add_rms_norm(S, R, W, EPSILON, out=R),
        "out: overlaps residual in memory",
    ),
    "out over slots": (
        lambda: reduce_add_rms_norm(S, R, W, EPSILON, out=S[0, 1]),
        "out: overlaps slots in memory",
    ),
    "out over residual_out": (
        lambda: reduce_add_rms_norm(
            S, R, W, EPSILON, out=MEMORY[:24].view(3, 8), residual_out=MEMORY[:24].view(3, 8)
        ),
        "out: overlaps residual_out in memory",
    ),
    "residual_out beside residual": (
        lambda: reduce_add_rms_norm(
            S, MEMORY[:24].view(3, 8), W, EPSILON, residual_out=MEMORY[8:32].view(3, 8)
        ),
        "residual_out: overlaps residual in memory",
    ),
    "residual_out over slots": (
        lambda: reduce_add_rms_norm(S, R, W, EPSILON, residual_out=S[0, 0]),
        "residual_out: overlaps slots in memory",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments_are_refused(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(InvalidArgumentError, match=message):
        call()
