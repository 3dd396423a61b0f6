"""Buffers of each op at a rank: sizes, input values and the expected result.

Ops with a final ``v`` are uneven: the shard of rank i is i + 1 times the shard of rank 0.
native/operations.hpp has the same definitions for the native contenders.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ROOT = 0


@dataclass(frozen=True)
class Buffers:
    """Input and output of a rank, and the expected content of ``result`` after a call.

    ``result`` is ``data`` for an in-place op, else ``output``. ``result`` and ``expected`` are None
    if the rank receives nothing.
    """

    data: torch.Tensor
    output: torch.Tensor
    result: torch.Tensor | None
    expected: torch.Tensor | None


def shares(total: int, ranks: int) -> list[int]:
    """Splits ``total`` elements into uneven shards of 1, 2, ... parts.

    The last shard takes the remainder.
    """
    parts = ranks * (ranks + 1) // 2
    first = [total * (index + 1) // parts for index in range(ranks - 1)]
    return [*first, total - sum(first)]


def sent(total: int, ranks: int, rank: int) -> list[int]:
    """Returns the number of elements sent by ``rank`` to each rank in an all_to_allv.

    ``total`` is the number of elements of each rank. The shard sizes of rank r are rotated by r
    positions, so two ranks send each other the same number of elements.
    """
    even = shares(total, ranks)
    return [even[(rank + peer) % ranks] for peer in range(ranks)]


def pattern(count: int, rank: int) -> torch.Tensor:
    """Returns small whole numbers; sums over a few ranks are exact in every dtype."""
    return (torch.arange(count, dtype=torch.int32) % 13 + 1) * (rank + 1)


def buffers(op: str, dtype: torch.dtype, count: int, rank: int, ranks: int) -> Buffers:
    """Returns the buffers for ``count`` elements per rank. Raises ValueError for an unknown op."""
    data = pattern(_own(op, count, rank, ranks), rank).to(dtype)
    expected = _expected(op, count, rank, ranks)
    output = torch.zeros(
        0 if expected is None or op in _IN_PLACE else expected.numel(), dtype=dtype
    )
    result = data if op in _IN_PLACE else output
    if expected is None:
        return Buffers(data, output, None, None)
    return Buffers(data, output, result, expected.to(dtype))


_IN_PLACE = ("all_reduce", "broadcast", "barrier")


def _own(op: str, count: int, rank: int, ranks: int) -> int:
    """Returns the number of input elements of ``rank``; ``count`` is the mean over the ranks."""
    return shares(count * ranks, ranks)[rank] if op == "all_gatherv" else count


def _expected(op: str, count: int, rank: int, ranks: int) -> torch.Tensor | None:
    everybody = range(ranks)
    total = pattern(count, 0) * (ranks * (ranks + 1) // 2)
    match op:
        case "all_reduce":
            return total
        case "all_gather":
            return torch.cat([pattern(count, peer) for peer in everybody])
        case "all_gatherv":
            sizes = shares(count * ranks, ranks)
            return torch.cat([pattern(sizes[peer], peer) for peer in everybody])
        case "reduce_scatter":
            return total.chunk(ranks)[rank]
        case "reduce_scatterv":
            return torch.split(total, shares(count, ranks))[rank]
        case "broadcast":
            return pattern(count, ROOT)
        case "gather":
            return torch.cat([pattern(count, p) for p in everybody]) if rank == ROOT else None
        case "all_to_all":
            return torch.cat([pattern(count, peer).chunk(ranks)[rank] for peer in everybody])
        case "all_to_allv":
            return torch.cat(
                [torch.split(pattern(count, p), sent(count, ranks, p))[rank] for p in everybody]
            )
        case "send_recv":
            return pattern(count, ROOT)
        case "barrier":
            return pattern(count, rank)
    raise ValueError(f"unknown op {op}")
