"""Options of the collectives benchmark: measured contenders and rejected values."""

from __future__ import annotations

from typing import Any

import pytest

from r2serve import tensors
from r2serve.bench.collectives.matrix import (
    ALGORITHMS,
    DEFAULT_SIZES,
    OPS,
    CollectiveCall,
    Contender,
    MatrixOptions,
    OptionError,
    Setting,
    format_size,
    parse_counts,
    parse_ops,
    parse_sizes,
)
from r2serve.bench.collectives.runner import MIN_SLICE_ITERATIONS, plan_slice
from r2serve.collectives import Collectives


def test_default_sizes_are_the_powers_of_four_from_1_kib_to_64_mib() -> None:
    assert parse_sizes(DEFAULT_SIZES) == tuple(1024 * 4**n for n in range(9))


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4096", (4096,)),
        ("1MiB, 64k, 4096", (4096, 65536, 1 << 20)),
        ("1KiB..16KiB,1024", (1024, 4096, 16384)),
        ("1k..5k", (1024, 4096)),
        ("", ()),
    ],
)
def test_sizes(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["huge", "12 parsecs", "4k..1k", "0..4k", "1k..", "-4"])
def test_wrong_sizes_name_the_option(text: str) -> None:
    with pytest.raises(OptionError, match="--sizes"):
        parse_sizes(text)


@pytest.mark.parametrize(
    ("values", "counts"),
    [(("2",), (2,)), (("2..8",), (2, 3, 4, 5, 6, 7, 8)), (("4, 2", "2..3"), (2, 3, 4))],
)
def test_counts(values: tuple[str, ...], counts: tuple[int, ...]) -> None:
    assert parse_counts("--ranks", values) == counts


@pytest.mark.parametrize("text", ["two", "8..2", "2..", "-1", "", "2-8"])
def test_wrong_counts_name_the_option(text: str) -> None:
    with pytest.raises(OptionError, match="--rails"):
        parse_counts("--rails", (text,))


def test_all_is_every_op() -> None:
    assert parse_ops(("broadcast", "all")) == OPS
    assert parse_ops(("broadcast",)) == ("broadcast",)


def test_every_algorithm_of_the_communicator_is_there() -> None:
    assert set(ALGORITHMS) == {name for name in tensors.ALGORITHMS if name}


def test_every_op_of_the_communicator_is_there() -> None:
    public = {name for name, value in vars(Collectives).items() if callable(value)}
    of_class = {name for name in public if not name.startswith("_")} - {"send", "recv"}
    assert {*of_class, "send_recv"} == set(OPS)


@pytest.mark.parametrize(
    ("size", "text"), [(1000, "1000 B"), (1024, "1 KiB"), (1 << 20, "1 MiB"), (1 << 30, "1 GiB")]
)
def test_sizes_are_shown_in_whole_units(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--op", {"ops": ("scan",)}),
        ("--op", {"ops": ()}),
        ("--dtype", {"dtypes": ("float8",)}),
        ("--impl", {"impls": ("nccl",)}),
        ("--state", {"states": ("broken",)}),
        ("--state two-lost needs at least 3 rails", {"states": ("two-lost",)}),
        ("--state slow needs at least 2 rails", {"states": ("slow",), "rails": (1,)}),
        ("--algorithm", {"algorithms": ("ring",)}),
        ("--ranks", {"ranks": (1,)}),
        ("--ranks", {"ranks": (65,)}),
        ("--rails", {"rails": (0,)}),
        ("--seconds", {"seconds": 0.0}),
        ("--rounds", {"rounds": 0}),
        ("--iterations", {"iterations": 3}),
        ("--sizes", {"sizes": ()}),
        ("--sizes", {"sizes": (1026,)}),
        ("--sizes", {"sizes": (1 << 31,)}),
    ],
)
def test_a_wrong_option_is_refused_by_name(option: str, values: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=option):
        MatrixOptions(**{"sizes": (1024,), **values})


def test_only_r2ccl_is_measured_with_several_algorithms() -> None:
    options = MatrixOptions(sizes=(1024,), algorithms=("one_shot", "two_shot"))
    assert [contender.label for contender in options.contenders("all_reduce")] == [
        "r2ccl/one_shot",
        "r2ccl/two_shot",
        "gloo",
        "openmpi",
        "mpich",
        "floor",
    ]
    assert [contender.label for contender in options.contenders("gather")][:2] == ["r2ccl", "gloo"]
    assert Contender("r2ccl").label == "r2ccl"


def test_the_matrix_is_the_product_of_its_options() -> None:
    options = MatrixOptions(
        ops=("all_reduce", "broadcast"), sizes=(1024, 4096), ranks=(2, 3), rails=(1, 2)
    )
    assert list(options.settings()) == [
        Setting(2, 1),
        Setting(2, 2),
        Setting(3, 1),
        Setting(3, 2),
    ]
    assert len(list(options.workloads(2))) == 4
    assert Setting(2, 3).addresses == ("127.0.0.1", "127.0.0.2", "127.0.0.3")


def test_sizes_are_rounded_up_to_whole_shares() -> None:
    options = MatrixOptions(ops=("reduce_scatter", "all_gather", "all_to_all"), sizes=(1024,))
    assert [workload.bytes for workload in options.workloads(3)] == [1032, 1024, 1032]
    assert {workload.bytes for workload in options.workloads(8)} == {1024}


def test_a_barrier_has_no_sizes() -> None:
    options = MatrixOptions(ops=("barrier",), sizes=(1024, 4096), dtypes=("float32", "int64"))
    assert list(options.workloads(2)) == [CollectiveCall("barrier", 0, "float32")]


def test_states_lose_the_first_rails() -> None:
    options = MatrixOptions(sizes=(1024,), rails=(2, 3), states=("healthy", "two-lost"))
    two, _, _, lost = options.settings()
    assert (two.lost, two.where, two.refusal()) == (0, "2 ranks, 2 rails", None)
    assert (lost.lost, lost.where) == (2, "2 ranks, 3 rails, two-lost")
    assert Setting(2, 2, "two-lost").refusal() == "--state two-lost needs at least 3 rails, not 2"
    assert Setting(2, 2, "one-lost").refusal() is None
    assert Setting(2, 1, "slow").refusal() is not None


def test_a_request_has_everything_that_a_worker_needs() -> None:
    request = CollectiveCall("all_reduce", 4096, "bfloat16").request("two_shot")
    assert request == "prepare all_reduce bfloat16 4096 two_shot"


def test_slices_fill_the_time_of_a_point() -> None:
    options = MatrixOptions(sizes=(1024,), seconds=1.0, rounds=5)
    assert plan_slice(options, 1e6).iterations == 200
    assert plan_slice(options, 1e9).iterations == MIN_SLICE_ITERATIONS
    assert plan_slice(MatrixOptions(sizes=(1024,), rounds=5, iterations=50), 1e6).iterations == 10
