"""What each op does to the buffers of a rank: their sizes, and the result that is right.

Ops with a ``v`` are uneven: rank i has, or brings, i + 1 parts where rank 0 has one.
native/operations.hpp says the same to the native peers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ROOT = 0


@dataclass(frozen=True)
class Buffers:
    """Input and output of one rank, and what ``result`` has to hold after one call.

    ``result`` is ``data`` or ``output``, whichever the op writes; None where this rank gets
    nothing.
    """

    data: torch.Tensor
    output: torch.Tensor
    result: torch.Tensor | None
    expected: torch.Tensor | None


def shares(total: int, ranks: int) -> list[int]:
    """``total`` elements in uneven shares of 1, 2, ... parts; the last one takes the rest."""
    parts = ranks * (ranks + 1) // 2
    first = [total * (index + 1) // parts for index in range(ranks - 1)]
    return [*first, total - sum(first)]


def sent(total: int, ranks: int, rank: int) -> list[int]:
    """How many of its ``total`` elements ``rank`` sends to each rank of an all_to_allv.

    Each rank turns the shares by one, so that all receive as much as they send.
    """
    even = shares(total, ranks)
    return [even[(rank + peer) % ranks] for peer in range(ranks)]


def pattern(count: int, rank: int) -> torch.Tensor:
    """Small whole numbers, so that sums over a few ranks are exact in every dtype."""
    return (torch.arange(count, dtype=torch.int32) % 13 + 1) * (rank + 1)


def buffers(op: str, dtype: torch.dtype, count: int, rank: int, ranks: int) -> Buffers:
    """The buffers for ``count`` elements per rank. Raises ValueError for an unknown op."""
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
    """Elements that the rank brings; ``count`` is their mean."""
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
