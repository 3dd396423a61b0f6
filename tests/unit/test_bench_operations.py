"""Ops on the buffers of a rank: shares, and expected results for checks of contenders."""

from __future__ import annotations

import pytest
import torch

from r2serve.bench.collectives.matrix import OPS
from r2serve.bench.collectives.operations import buffers, sent, shares


@pytest.mark.parametrize(
    ("total", "ranks", "parts"),
    [(12, 3, [2, 4, 6]), (13, 3, [2, 4, 7]), (0, 2, [0, 0]), (1, 2, [0, 1]), (1000, 1, [1000])],
)
def test_shares_are_uneven_and_whole(total: int, ranks: int, parts: list[int]) -> None:
    assert shares(total, ranks) == parts


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_each_rank_receives_as_much_as_it_sends(ranks: int) -> None:
    table = [sent(1000, ranks, rank) for rank in range(ranks)]
    assert all(sum(row) == 1000 for row in table)
    assert [list(column) for column in zip(*table, strict=True)] == table


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("op", OPS)
def test_ranks_together_neither_lose_nor_invent_elements(op: str, ranks: int) -> None:
    count = 0 if op == "barrier" else 12 * ranks
    each = [buffers(op, torch.float32, count, rank, ranks) for rank in range(ranks)]
    assert sum(one.data.numel() for one in each) == count * ranks
    got = [0 if one.expected is None else one.expected.numel() for one in each]
    gathered = {"all_gather": ranks, "all_gatherv": ranks, "gather": 1}
    scattered = {"reduce_scatter": 1, "reduce_scatterv": 1}
    times = gathered.get(op, scattered.get(op, ranks))
    assert sum(got) == times * count * (ranks if op in gathered else 1)
    for one in each:
        if one.expected is not None:
            assert one.result is not None
            assert one.result.shape == one.expected.shape


def test_small_cases_by_hand() -> None:
    def expected(op: str, count: int, rank: int) -> list[float]:
        result = buffers(op, torch.float32, count, rank, 2).expected
        assert result is not None
        return [float(value) for value in result]

    # Rank 0 has the input 1, 2, 3, ...; rank 1 has 2, 4, 6, ...
    assert expected("all_reduce", 3, 0) == [3, 6, 9]
    assert expected("reduce_scatter", 4, 1) == [9, 12]
    assert expected("reduce_scatterv", 3, 1) == [6, 9]
    assert expected("all_gather", 2, 0) == [1, 2, 2, 4]
    assert expected("all_gatherv", 3, 0) == [1, 2, 2, 4, 6, 8]
    assert expected("gather", 2, 0) == [1, 2, 2, 4]
    assert expected("broadcast", 2, 1) == [1, 2]
    assert expected("all_to_all", 2, 1) == [2, 4]
    assert expected("all_to_allv", 3, 0) == [1, 2, 4]
    assert expected("send_recv", 2, 0) == [1, 2]
    assert buffers("gather", torch.float32, 2, 1, 2).expected is None


def test_an_unknown_op_is_refused() -> None:
    with pytest.raises(ValueError, match="scan"):
        buffers("scan", torch.float32, 1, 0, 2)
