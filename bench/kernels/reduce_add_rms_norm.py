"""Benchmark of ``reduce_add_rms_norm`` beside sum, addition and RMSNorm in PyTorch."""

from __future__ import annotations

from functools import partial

import torch

from r2serve.bench.kernels.inputs import DTYPES, arrived, normal
from r2serve.bench.kernels.rows import Case, Contenders
from r2serve.kernels.reduce_add_rms_norm import reduce_add_rms_norm

HIDDEN = 8192
FEW_ROWS = (1, 8, 64)
MANY_ROWS = (4096, 16384)
PEERS = (2, 4, 8)
EPSILON = 1e-5


def separate(
    slots: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    x = slots[0].sum(0).float() + residual.float()
    normed = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + EPSILON)
    return normed.to(weight.dtype) * weight, x.to(slots.dtype)


def build(
    rows: int, hidden: int, dtype: str, peers: int, waits: bool, device: torch.device
) -> Contenders:
    slots = normal((1, peers, rows, hidden), dtype, device)
    residual, weight = normal((rows, hidden), dtype, device), normal((hidden,), dtype, device)
    out, residual_out = torch.empty_like(residual), torch.empty_like(residual)
    arrival = arrived(device) if waits else None
    compiled = torch.compile(separate)
    return Contenders(
        lambda: reduce_add_rms_norm(
            slots,
            residual,
            weight,
            EPSILON,
            out=out,
            residual_out=residual_out,
            arrival=arrival,
        ),
        lambda: separate(slots, residual, weight),
        lambda: compiled(slots, residual, weight),
    )


def case(rows: int, peers: int, waits: bool = False) -> Case:
    size = DTYPES["bfloat16"].itemsize
    # A waiting kernel reads host memory across PCIe. The targets "latency" and "bandwidth" do not
    # include this read.
    own = () if waits else ("latency",) if rows <= max(FEW_ROWS) else ("bandwidth",)
    return Case(
        "reduce_add_rms_norm",
        (rows, HIDDEN),
        "bfloat16",
        peers,
        (peers + 3) * rows * HIDDEN * size + HIDDEN * size,
        partial(build, rows, HIDDEN, "bfloat16", peers, waits),
        waits,
        (*own, "eager", "compiled"),
    )


def cases() -> list[Case]:
    plain = [case(rows, peers) for rows in (*FEW_ROWS, *MANY_ROWS) for peers in PEERS]
    return [*plain, case(8, 2, waits=True), case(4096, 2, waits=True)]
