"""Times the cases of all kernels, in sequence, on the same device and in the same run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from r2serve.bench.kernels import (
    quantize_chunks,
    reduce_add_rms_norm,
    reduce_add_rms_norm_fp8,
    reduce_chunks,
    reduce_quantized_chunks,
    timing,
)
from r2serve.bench.kernels.replay import ReplayRow
from r2serve.bench.kernels.rows import Case, KernelRow, KernelTimes, Machine, row_of

KERNELS: dict[str, Callable[[], list[Case]]] = {
    "reduce_chunks": reduce_chunks.cases,
    "reduce_add_rms_norm": reduce_add_rms_norm.cases,
    "reduce_add_rms_norm_fp8": reduce_add_rms_norm_fp8.cases,
    "quantize_chunks": quantize_chunks.cases,
    "reduce_quantized_chunks": reduce_quantized_chunks.cases,
}


def measure_machine(timer: timing.Timer, device: torch.device) -> Machine:
    copy, moved = timing.copy_call(device)
    return Machine(timer.median_us(timing.empty), moved / timer.median_us(copy))


def measure(case: Case, timer: timing.Timer, device: torch.device) -> KernelTimes:
    contenders = case.build(device)
    return KernelTimes(
        timer.median_us(contenders.kernel),
        timer.median_us(contenders.eager),
        timer.median_us(contenders.compiled),
    )


def run(
    cases: Iterable[Case], timer: timing.Timer, device: torch.device, machine: Machine
) -> Iterator[KernelRow]:
    for case in cases:
        yield row_of(case, measure(case, timer, device), machine)


def write_jsonl(
    path: Path, metadata: dict[str, Any], rows: Iterable[KernelRow | ReplayRow]
) -> None:
    """Writes the metadata as the first line, then a line for each row."""
    lines = [{"metadata": metadata}, *(row.as_json() for row in rows)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
