"""Inputs of the kernels' benchmarks: values do not matter to the time, but NaN would to checks."""

from __future__ import annotations

import torch

from r2serve.kernels.arrival import Arrival

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int8": torch.int8,
}


def normal(shape: tuple[int, ...], dtype: str, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, device=device).to(DTYPES[dtype])


def arrived(device: torch.device) -> Arrival:
    """A collective that is complete, so that what is timed is the look at the words."""

    def word() -> torch.Tensor:
        made = torch.zeros(1, dtype=torch.int32)
        return made.pin_memory() if device.type == "cuda" else made

    return Arrival(torch.zeros(1, dtype=torch.int32, device=device), word(), word())
