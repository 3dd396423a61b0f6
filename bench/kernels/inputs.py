"""Inputs of the kernel benchmarks: normal random values, because NaN would break checks."""

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
    """Returns the arrival words of a complete collective: only the read of the words is timed."""

    def word() -> torch.Tensor:
        made = torch.zeros(1, dtype=torch.int32)
        return made.pin_memory() if device.type == "cuda" else made

    return Arrival(torch.zeros(1, dtype=torch.int32, device=device), word(), word())
