"""Benchmark of ``reduce_add_rms_norm_fp8`` beside the same computation in PyTorch."""

from __future__ import annotations

from functools import partial

import torch

from r2serve.bench.kernels.inputs import DTYPES, normal
from r2serve.bench.kernels.reduce_add_rms_norm import (
    EPSILON,
    FEW_ROWS,
    HIDDEN,
    PEERS,
    separate,
)
from r2serve.bench.kernels.rows import Case, Contenders
from r2serve.kernels.reduce_add_rms_norm_fp8 import (
    LARGEST,
    SMALLEST_SCALE,
    reduce_add_rms_norm_fp8,
)

MANY_ROWS = (4096,)


def separate_fp8(
    slots: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    normed, new = separate(slots, residual, weight)
    wide = normed.float()
    scales = (wide.abs().amax(dim=-1, keepdim=True) / LARGEST).clamp(min=SMALLEST_SCALE)
    codes = (wide * scales.reciprocal()).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return codes, scales, new


def build(rows: int, hidden: int, dtype: str, peers: int, device: torch.device) -> Contenders:
    slots = normal((1, peers, rows, hidden), dtype, device)
    residual, weight = normal((rows, hidden), dtype, device), normal((hidden,), dtype, device)
    out = torch.empty(residual.shape, dtype=torch.float8_e4m3fn, device=device)
    scales, residual_out = torch.empty(rows, 1, device=device), torch.empty_like(residual)
    compiled = torch.compile(separate_fp8)
    return Contenders(
        lambda: reduce_add_rms_norm_fp8(
            slots,
            residual,
            weight,
            EPSILON,
            out=out,
            scales_out=scales,
            residual_out=residual_out,
        ),
        lambda: separate_fp8(slots, residual, weight),
        lambda: compiled(slots, residual, weight),
    )


def case(rows: int, peers: int) -> Case:
    size = DTYPES["bfloat16"].itemsize
    own = "latency" if rows <= max(FEW_ROWS) else "bandwidth"
    return Case(
        "reduce_add_rms_norm_fp8",
        (rows, HIDDEN),
        "bfloat16",
        peers,
        rows * HIDDEN * ((peers + 2) * size + 1) + HIDDEN * size + 4 * rows,
        partial(build, rows, HIDDEN, "bfloat16", peers),
        targets=(own, "eager", "compiled"),
    )


def cases() -> list[Case]:
    return [case(rows, peers) for rows in (*FEW_ROWS, *MANY_ROWS) for peers in PEERS]
