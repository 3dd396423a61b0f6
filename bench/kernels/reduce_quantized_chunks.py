"""Benchmark of ``reduce_quantized_chunks`` beside the same computation in PyTorch."""

from __future__ import annotations

from functools import partial

import torch

from r2serve.bench.kernels.inputs import DTYPES, normal
from r2serve.bench.kernels.quantize_chunks import COUNTS, WIRES
from r2serve.bench.kernels.rows import Case, Contenders
from r2serve.kernels.quantize_chunks import DEFAULT_BLOCK, quantize_chunks
from r2serve.kernels.reduce_quantized_chunks import reduce_quantized_chunks

PEERS = (2, 8)


def separate(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    peers = codes.shape[1]
    values = codes[0].float().view(peers, -1, DEFAULT_BLOCK) * scales[0, :, :, None]
    return values.sum(0).flatten().to(torch.bfloat16)


def build(count: int, wire: str, peers: int, device: torch.device) -> Contenders:
    made = [
        quantize_chunks(normal((count,), "bfloat16", device), DTYPES[wire]) for _ in range(peers)
    ]
    codes = torch.stack([codes for codes, _ in made])[None]
    scales = torch.stack([scales for _, scales in made])[None]
    out = torch.empty(count, dtype=torch.bfloat16, device=device)
    compiled = torch.compile(separate)
    return Contenders(
        lambda: reduce_quantized_chunks(codes, scales, torch.bfloat16, out=out),
        lambda: separate(codes, scales),
        lambda: compiled(codes, scales),
    )


def case(count: int, wire: str, peers: int) -> Case:
    return Case(
        "reduce_quantized_chunks",
        (count,),
        f"{wire} to bfloat16",
        peers,
        peers * (count + 4 * count // DEFAULT_BLOCK) + 2 * count,
        partial(build, count, wire, peers),
    )


def cases() -> list[Case]:
    return [case(count, wire, peers) for count in COUNTS for wire in WIRES for peers in PEERS]
