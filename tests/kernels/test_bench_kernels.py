"""Rows, targets and command of the kernel benchmark, with a fake timer."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from inputs import DEVICE
from rich.console import Console

from r2serve.bench.kernels import (
    cli,
    quantize_chunks,
    reduce_add_rms_norm,
    reduce_add_rms_norm_fp8,
    reduce_chunks,
    reduce_quantized_chunks,
    runner,
    timing,
)
from r2serve.bench.kernels.rows import (
    Case,
    Contenders,
    KernelRow,
    KernelTimes,
    Machine,
    row_of,
    targets_of,
)


def kernel() -> None:
    """Replaces a measured call; the fake timer looks up the time by the function's name."""


def eager() -> None:
    pass


def compiled() -> None:
    pass


class FakeTimer:
    def __init__(self, **times_us: float) -> None:
        self.times_us = times_us

    def median_us(self, call: Callable[[], Any]) -> float:
        return self.times_us[call.__name__]


MACHINE = Machine(empty_us=2.0, copy_bytes_per_us=4e6)  # 4 TB/s


def case(**changed: Any) -> Case:
    given: dict[str, Any] = {
        "kernel": "k",
        "shape": (64, 8192),
        "dtype": "bfloat16",
        "peers": 2,
        "moved_bytes": 40_000_000,  # 10 us
        "build": lambda _: Contenders(kernel, eager, compiled),
    }
    return Case(**(given | changed))


@pytest.mark.parametrize(
    ("kernel_us", "moved_us", "reached"),
    [(12.5, 10, True), (12.6, 10, False), (3.0, 0.1, True), (3.1, 0.1, False)],
)
def test_latency_is_against_the_bytes_or_an_empty_kernel(
    kernel_us: float, moved_us: float, reached: bool
) -> None:
    [target] = targets_of(
        ["latency"], KernelTimes(kernel_us, 1, 1), empty_us=2.0, moved_us=moved_us
    )
    assert target.reached is reached


@pytest.mark.parametrize(
    ("name", "times", "value", "reached"),
    [
        ("bandwidth", KernelTimes(10 / 0.85, 1, 1), 0.85, True),
        ("bandwidth", KernelTimes(12, 1, 1), 10 / 12, False),
        ("eager", KernelTimes(10, 15, 1), 1.5, True),
        ("eager", KernelTimes(10, 14.9, 1), 1.49, False),
        ("compiled", KernelTimes(10, 1, 10), 1.0, True),
        ("compiled", KernelTimes(10, 1, 9.9), 0.99, False),
    ],
)
def test_targets(name: str, times: KernelTimes, value: float, reached: bool) -> None:
    [target] = targets_of([name], times, empty_us=1.0, moved_us=10.0)
    assert target.value == pytest.approx(value)
    assert target.reached is reached


def test_a_row_has_measurements_and_targets() -> None:
    targets = ("latency", "bandwidth", "eager", "compiled")
    timer = FakeTimer(kernel=12.0, eager=30.0, compiled=11.0)
    [row] = runner.run([case(targets=targets)], timer, DEVICE, MACHINE)
    assert (row.median_us, row.eager_us, row.compiled_us) == (12.0, 30.0, 11.0)
    assert (row.empty_us, row.moved_us) == (2.0, 10.0)
    assert [one.reached for one in row.targets] == [True, False, True, False]
    assert not row.reached
    told = row.as_json()
    assert told["reached"] is False
    assert told["targets"][2] == {"name": "eager", "value": 2.5, "least": 1.5, "reached": True}


def test_reference_values_are_an_empty_kernel_and_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy() -> None:
        pass

    monkeypatch.setattr(timing, "copy_call", lambda device: (copy, 1000))
    found = runner.measure_machine(FakeTimer(empty=2.5, copy=10.0), DEVICE)
    assert found == Machine(empty_us=2.5, copy_bytes_per_us=100.0)


def test_a_copy_reads_and_writes() -> None:
    call, moved = timing.copy_call(DEVICE, size=64)
    call()
    assert moved == 128


def test_jsonl(tmp_path: Path) -> None:
    rows = [
        row_of(case(), KernelTimes(10, 20, 10), MACHINE),
        row_of(case(), KernelTimes(9, 1, 1), MACHINE),
    ]
    runner.write_jsonl(tmp_path / "out.jsonl", {"gpu": "none"}, rows)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert lines[0] == {"metadata": {"gpu": "none"}}
    assert [line["reached"] for line in lines[1:]] == [True, False]
    assert lines[1]["shape"] == [64, 8192]


def test_the_table_names_missed_targets() -> None:
    rows: list[KernelRow] = [row_of(case(), KernelTimes(10, 14, 10), MACHINE)]
    console = Console(width=200, record=True, file=io.StringIO())
    cli.show(rows, console)
    assert "eager 1.40/1.50 missed, compiled 1.00/1.00" in console.export_text()


def test_every_case_states_the_moved_bytes() -> None:
    for name, cases in runner.KERNELS.items():
        for one in cases():
            assert one.kernel == name
            assert one.moved_bytes > 0
            targets_of(one.targets, KernelTimes(1, 1, 1), 1, 1)
    moved = {(one.shape, one.peers): one.moved_bytes for one in reduce_add_rms_norm.cases()}
    # 64 rows of 8192 in bf16.  Reads: 2 slots, residual, weight.  Writes: normed, new residual.
    assert moved[(64, 8192), 2] == 5 * 64 * 8192 * 2 + 8192 * 2


CONTENDERS = {
    "reduce_chunks": lambda: reduce_chunks.build(1000, "float32", 3, False, DEVICE),
    "reduce_chunks, waiting": lambda: reduce_chunks.build(1000, "float32", 3, True, DEVICE),
    "norm": lambda: reduce_add_rms_norm.build(2, 64, "float32", 3, False, DEVICE),
    "norm, waiting": lambda: reduce_add_rms_norm.build(2, 64, "float32", 3, True, DEVICE),
    "norm_fp8": lambda: reduce_add_rms_norm_fp8.build(2, 64, "float32", 3, DEVICE),
    "quantize": lambda: quantize_chunks.build(1024, "float8_e4m3fn", DEVICE),
    "quantize, int8": lambda: quantize_chunks.build(1024, "int8", DEVICE),
    "dequantize": lambda: reduce_quantized_chunks.build(1024, "int8", 3, DEVICE),
}


@pytest.mark.parametrize("name", CONTENDERS)
def test_contenders_compute_the_same(name: str) -> None:
    """Times are comparable only for the same computation.  torch.compile uses the eager code."""
    contenders = CONTENDERS[name]()
    ours, theirs = contenders.kernel(), contenders.eager()
    if isinstance(ours, torch.Tensor):
        ours, theirs = (ours,), (theirs,)
    for one, other in zip(ours, theirs, strict=True):
        tolerance = 0.13 if one.dtype == torch.float8_e4m3fn else 1e-2  # 0.13: a step of fp8
        torch.testing.assert_close(one.float(), other.float(), rtol=tolerance, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_the_command_reports_a_missing_gpu() -> None:
    result = CliRunner().invoke(cli.kernels, [])
    assert result.exit_code == 77
    assert "no CUDA device here" in result.output


def test_an_unknown_kernel_is_refused() -> None:
    result = CliRunner().invoke(cli.kernels, ["--kernel", "matmul"])
    assert result.exit_code == 2
    assert "matmul" in result.output
