"""Reference implementations of the kernels in plain PyTorch, for tests: slow and simple.

``slots`` is a single entry of a ring in this module: (peers, ...).
"""

from __future__ import annotations

import torch

QUIET_NANS = {torch.float16: 0x7E00, torch.bfloat16: 0x7FC0, torch.float32: 0x7FC00000}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor's bits as integers, for comparisons with NaN and -0."""
    return tensor.contiguous().view(_BITS[tensor.element_size()])


def with_one_nan(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same numbers, with the bits of the core's quiet NaN in every NaN."""
    nan = torch.tensor(QUIET_NANS[tensor.dtype], dtype=_BITS[tensor.element_size()])
    return torch.where(tensor.isnan(), nan.to(tensor.device), bits(tensor)).view(tensor.dtype)


def reduce_chunks(slots: torch.Tensor) -> torch.Tensor:
    total = slots[0].to(torch.float32)
    for slot in slots[1:]:
        total = total + slot.to(torch.float32)
    return with_one_nan(total.to(slots.dtype))


def reduce_add_rms_norm(
    slots: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (normed, new residual).

    The mean of squares is computed in fp64 and rounded once, and so does not depend on the order.
    """
    dtype = residual.dtype
    x = reduce_chunks(slots).to(torch.float32) + residual.to(torch.float32)
    mean = x.to(torch.float64).pow(2).mean(dim=-1, keepdim=True).to(torch.float32)
    factor = 1 / torch.sqrt(mean + epsilon)
    normed = ((x * factor).to(weight.dtype) * weight).to(dtype)
    return with_one_nan(normed), with_one_nan(x.to(dtype))


def quantise_rows(normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the fp8 codes and scales of ``reduce_add_rms_norm_fp8`` for given normed rows."""
    largest = normed.to(torch.float32).abs().amax(dim=-1, keepdim=True)
    scales = with_one_nan(_quotient(largest, 448.0).clamp(min=1.0 / (448.0 * 512.0)))
    return _e4m3(normed.to(torch.float32) * (1 / scales)), scales


def quantize_chunks(
    values: torch.Tensor, dtype: torch.dtype, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes of the values' shape, and a scale for each block of the flattened values."""
    flat = values.to(torch.float32).flatten()
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % block)).view(-1, block)
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    scales = with_one_nan(_quotient(largest, LARGEST[dtype]).clamp(min=2.0**-126))
    scaled = blocks * (1 / scales)
    codes = _e4m3(scaled) if dtype == torch.float8_e4m3fn else _int8(scaled)
    return codes.flatten()[: flat.numel()].view(values.shape), scales.flatten()


def reduce_quantized_chunks(
    codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, block: int
) -> torch.Tensor:
    """Returns the sum; ``codes`` is (peers, ...), ``scales`` is (peers, blocks)."""
    count = codes[0].numel()
    total = torch.zeros(0)
    for peer, (code, scale) in enumerate(zip(codes, scales, strict=True)):
        spread = scale.repeat_interleave(block)[:count]
        part = code.flatten().to(torch.float32) * spread
        total = part if peer == 0 else total + part
    return with_one_nan(total.to(dtype)).view(codes.shape[1:])


def _quotient(tensor: torch.Tensor, number: float) -> torch.Tensor:
    """Returns the quotient, rounded once.

    On a GPU, ``tensor / number`` would multiply by the rounded reciprocal.
    """
    return tensor / torch.full_like(tensor, number)


def _e4m3(scaled: torch.Tensor) -> torch.Tensor:
    codes = scaled.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    return (
        torch.where(scaled.isnan(), 0x7F, codes.to(torch.int16))
        .to(torch.uint8)
        .view(torch.float8_e4m3fn)
    )


def _int8(scaled: torch.Tensor) -> torch.Tensor:
    return torch.where(scaled.isnan(), 0.0, scaled.round()).to(torch.int8)
