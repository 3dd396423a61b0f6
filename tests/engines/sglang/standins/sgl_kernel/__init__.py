"""Stand-in for SGLang's kernels: the operation of the CPU path without AMX; see ../README.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

__version__ = "0.4.10+standin"


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Writes the places of new tokens into the table of requests.

    Args:
        req_pool_indices: (requests,), row of each request in the table.
        req_to_token: (rows, pool_len), the table, written in place.
        start_offset, end_offset: (requests,), columns of each request's new tokens.
        out_cache_loc: (sum of new tokens,), places in the cache, request after request.
    """
    assert req_to_token.shape[1] == pool_len, f"pool_len {pool_len} of {req_to_token.shape}"
    begin = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, first, end in rows:
        places = out_cache_loc[begin : begin + end - first]
        req_to_token[row, first:end] = places.to(req_to_token.dtype)
        begin += end - first


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name}: not in the stand-in for CPUs")

    return missing
