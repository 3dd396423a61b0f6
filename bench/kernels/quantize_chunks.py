"""Benchmark of ``quantize_chunks`` beside the same computation in PyTorch."""

from __future__ import annotations

from functools import partial

import torch

from r2serve.bench.kernels.inputs import DTYPES, normal
from r2serve.bench.kernels.rows import Case, Contenders
from r2serve.kernels.quantize_chunks import (
    DEFAULT_BLOCK,
    LARGEST,
    SMALLEST_SCALE,
    quantize_chunks,
)

COUNTS = (2**13, 2**25)
WIRES = ("float8_e4m3fn", "int8")


def separate(values: torch.Tensor, wire: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = values.float().view(-1, DEFAULT_BLOCK)
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    scales = (largest / LARGEST[wire]).clamp(min=SMALLEST_SCALE)
    scaled = blocks * scales.reciprocal()
    if wire == torch.int8:
        scaled = scaled.round()
    return scaled.to(wire).view(values.shape), scales.flatten()


def build(count: int, wire_name: str, device: torch.device) -> Contenders:
    wire = DTYPES[wire_name]
    values = normal((count,), "bfloat16", device)
    out = torch.empty(count, dtype=wire, device=device)
    scales = torch.empty(count // DEFAULT_BLOCK, device=device)
    compiled = torch.compile(separate)
    return Contenders(
        lambda: quantize_chunks(values, wire, out=out, scales_out=scales),
        lambda: separate(values, wire),
        lambda: compiled(values, wire),
    )


def case(count: int, wire: str) -> Case:
    return Case(
        "quantize_chunks",
        (count,),
        f"bfloat16 to {wire}",
        1,
        3 * count + 4 * count // DEFAULT_BLOCK,
        partial(build, count, wire),
    )


def cases() -> list[Case]:
    return [case(count, wire) for count in COUNTS for wire in WIRES]
