"""Benchmark of ``reduce_chunks`` beside a sum in PyTorch."""

from __future__ import annotations

from functools import partial

import torch

from r2serve.bench.kernels.inputs import DTYPES, arrived, normal
from r2serve.bench.kernels.rows import Case, Contenders
from r2serve.kernels.reduce_chunks import reduce_chunks

COUNTS = (2**13, 2**19, 2**25)
PEERS = (2, 8)


def build(count: int, dtype: str, peers: int, waits: bool, device: torch.device) -> Contenders:
    slots = normal((1, peers, count), dtype, device)
    out = torch.empty(count, dtype=slots.dtype, device=device)
    arrival = arrived(device) if waits else None

    def eager() -> torch.Tensor:
        return slots[0].sum(0)

    return Contenders(
        lambda: reduce_chunks(slots, out=out, arrival=arrival), eager, torch.compile(eager)
    )


def case(count: int, dtype: str, peers: int, waits: bool = False) -> Case:
    return Case(
        "reduce_chunks",
        (count,),
        dtype,
        peers,
        (peers + 1) * count * DTYPES[dtype].itemsize,
        partial(build, count, dtype, peers, waits),
        waits,
        ("bandwidth", "compiled") if count >= 2**25 else ("compiled",),
    )


def cases() -> list[Case]:
    return [
        *(case(count, "bfloat16", peers) for count in COUNTS for peers in PEERS),
        case(COUNTS[0], "bfloat16", 2, waits=True),
    ]
