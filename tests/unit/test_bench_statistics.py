"""Percentiles, bandwidth and rows of the collectives benchmark."""

from __future__ import annotations

import pytest

from r2serve.bench.collectives.matrix import CollectiveCall, Contender, Setting
from r2serve.bench.collectives.resilience import evaluate
from r2serve.bench.collectives.statistics import (
    bus_bandwidth_gbps,
    median,
    percentile,
    summarise,
    wire_bytes,
)


@pytest.mark.parametrize(
    ("percent", "expected"), [(1, 1), (50, 50), (50.5, 51), (95, 95), (99, 99), (100, 100)]
)
def test_percentile_is_the_nearest_rank(percent: float, expected: int) -> None:
    assert percentile(list(range(100, 0, -1)), percent) == expected


def test_percentile_is_always_a_measured_value() -> None:
    assert median([10, 1000]) == 10
    assert percentile([7], 99) == 7


@pytest.mark.parametrize("percent", [0, -1, 100.1])
def test_percentile_refuses_an_invalid_percentage(percent: float) -> None:
    with pytest.raises(ValueError, match="percent"):
        percentile([1], percent)


def test_percentile_refuses_no_values() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


@pytest.mark.parametrize(
    ("op", "ranks", "expected"),
    [
        ("all_reduce", 2, 1000),
        ("all_reduce", 4, 1500),
        ("all_gather", 4, 3000),
        ("reduce_scatter", 4, 750),
        ("broadcast", 4, 1000),
        ("all_gatherv", 4, 3000),
        ("reduce_scatterv", 4, 750),
        ("gather", 4, 3000),
        ("all_to_all", 4, 750),
        ("all_to_allv", 4, 750),
        ("send_recv", 4, 4000),
        ("barrier", 4, 0),
    ],
)
def test_wire_bytes(op: str, ranks: int, expected: float) -> None:
    assert wire_bytes(op, 1000, ranks) == expected


def test_bandwidth_of_an_unknown_op_is_an_error() -> None:
    with pytest.raises(ValueError, match="scan"):
        wire_bytes("scan", 1000, 2)


def test_bus_bandwidth_is_in_gigabits_a_second() -> None:
    # 1 MB in 1 ms is 1 GB/s, so 8 Gbit/s.
    assert bus_bandwidth_gbps("all_reduce", 1_000_000, 2, 1000.0) == pytest.approx(8.0)


def test_a_row_has_rank_zeros_latency_and_the_slowest_ranks_median() -> None:
    rank0 = [1000 * value for value in range(1, 101)]
    rank1 = [2000 * value for value in range(1, 101)]
    row = summarise(
        Setting(ranks=2, rails=2),
        CollectiveCall("all_reduce", 4096, "float32"),
        Contender("r2ccl", "two_shot"),
        [rank0, rank1],
    )
    assert (row.p50_us, row.p95_us, row.p99_us) == (50, 95, 99)
    assert row.p50_slowest_us == 100
    assert row.samples == 100
    assert (row.impl, row.algorithm, row.state) == ("r2ccl", "two_shot", "healthy")


def test_cpu_time_is_divided_by_the_input_bytes_of_all_ranks() -> None:
    setting, contender = Setting(ranks=2, rails=2), Contender("r2ccl")
    times = [[1000, 1000], [1000, 1000]]
    row = summarise(setting, CollectiveCall("all_reduce", 500, "float32"), contender, times, 4000)
    assert row.cpu_ns_per_byte == pytest.approx(2.0)
    barrier = summarise(setting, CollectiveCall("barrier", 0, "float32"), contender, times, 4000)
    assert (barrier.cpu_ns_per_byte, barrier.busbw_gbps) == (None, 0)


def test_resilience_ratio_is_the_median_over_pairs_and_survives_a_drift() -> None:
    setting, workload = Setting(2, 2), CollectiveCall("all_reduce", 1024, "float32")
    # The machine becomes three times slower half way: the pairs' ratio stays 1.02.
    off = [[1000, 1000, 1000]] * 5 + [[3000, 3000, 3000]] * 5
    on = [[1020, 1020, 1020]] * 5 + [[3060, 3060, 3060]] * 5
    pairs = evaluate(setting, workload, on, off)
    assert pairs.ratio == pytest.approx(1.02)
    assert pairs.ratio_low == pytest.approx(1.02)
    assert pairs.ratio_high == pytest.approx(1.02)
    assert pairs.pairs == 10
