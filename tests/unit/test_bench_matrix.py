"""Options of the collectives benchmark: what is measured and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from r2serve.bench.collectives.matrix import (
    DEFAULT_SIZES,
    Contender,
    OptionError,
    Options,
    Setting,
    Workload,
    format_size,
    parse_sizes,
)
from r2serve.bench.collectives.runner import MIN_SLICE_ITERATIONS, plan_slice


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
        ("--impl", {"impls": ("mpich",)}),
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
        ("--sizes", {"sizes": (1028,), "ops": ("reduce_scatter",)}),
    ],
)
def test_a_wrong_option_is_refused_by_name(option: str, values: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=option):
        Options(**{"sizes": (1024,), **values})


def test_only_r2ccl_is_measured_with_several_algorithms() -> None:
    options = Options(sizes=(1024,), algorithms=("one_shot", "two_shot"))
    assert [contender.label for contender in options.contenders()] == [
        "r2ccl/one_shot",
        "r2ccl/two_shot",
        "gloo",
        "openmpi",
        "floor",
    ]
    assert Contender("r2ccl").label == "r2ccl"


def test_the_matrix_is_the_product_of_its_options() -> None:
    options = Options(
        ops=("all_reduce", "broadcast"), sizes=(1024, 4096), ranks=(2, 3), rails=(1, 2)
    )
    assert list(options.settings()) == [
        Setting(2, 1),
        Setting(2, 2),
        Setting(3, 1),
        Setting(3, 2),
    ]
    assert len(list(options.workloads())) == 4
    assert Setting(2, 3).addresses == ("127.0.0.1", "127.0.0.2", "127.0.0.3")


def test_a_request_says_all_that_a_worker_needs() -> None:
    request = Workload("all_reduce", 4096, "bfloat16").request("two_shot")
    assert request == "prepare all_reduce bfloat16 4096 two_shot"


def test_slices_fill_the_time_of_a_point() -> None:
    options = Options(sizes=(1024,), seconds=1.0, rounds=5)
    assert plan_slice(options, 1e6).iterations == 200
    assert plan_slice(options, 1e9).iterations == MIN_SLICE_ITERATIONS
    assert plan_slice(Options(sizes=(1024,), rounds=5, iterations=50), 1e6).iterations == 10
