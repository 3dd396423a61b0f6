"""Benchmark cases, targets and result rows of kernels.  This module needs no GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Contenders:
    """Calls with the same computation on the same inputs; the inputs exist before the calls."""

    kernel: Callable[[], Any]
    eager: Callable[[], Any]
    compiled: Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A kernel at a shape.

    ``moved_bytes``: minimum number of bytes to read and write.
    """

    kernel: str
    shape: tuple[int, ...]
    dtype: str
    peers: int
    moved_bytes: int
    build: Callable[[torch.device], Contenders]
    waits: bool = False
    targets: tuple[str, ...] = ("eager", "compiled")


@dataclass(frozen=True)
class Machine:
    """Reference values, measured once per run.

    ``copy_bytes_per_us`` is the speed of a large copy; bytes read and bytes written both count.
    """

    empty_us: float
    copy_bytes_per_us: float


@dataclass(frozen=True)
class KernelTimes:
    kernel_us: float
    eager_us: float
    compiled_us: float


@dataclass(frozen=True)
class KernelTarget:
    """A target for the ratio ``value``; reached if ``value`` is at least ``least``."""

    name: str
    value: float
    least: float

    @property
    def reached(self) -> bool:
        return self.value >= self.least

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "reached": self.reached}


@dataclass(frozen=True)
class KernelRow:
    """Result of a case.  Times are medians in us.

    ``moved_us`` is the time to move the case's bytes at the measured copy bandwidth.
    """

    kernel: str
    shape: tuple[int, ...]
    dtype: str
    peers: int
    waits: bool
    median_us: float
    empty_us: float
    moved_us: float
    eager_us: float
    compiled_us: float
    targets: tuple[KernelTarget, ...]

    @property
    def reached(self) -> bool:
        return all(target.reached for target in self.targets)

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "targets": [target.as_json() for target in self.targets],
            "reached": self.reached,
        }


def targets_of(
    names: Sequence[str], times: KernelTimes, empty_us: float, moved_us: float
) -> list[KernelTarget]:
    """Returns the targets with the given names.

    * latency: at most 1.25 x the time of a copy of the moved bytes, or 1.5 x an empty kernel;
    * bandwidth: at least 85 % of the copy bandwidth;
    * eager: 1.5 x faster than the same computation in PyTorch eager;
    * compiled: not slower than the same computation under torch.compile.
    """
    kernel_us = times.kernel_us
    known = {
        "latency": KernelTarget("latency", max(1.25 * moved_us, 1.5 * empty_us) / kernel_us, 1.0),
        "bandwidth": KernelTarget("bandwidth", moved_us / kernel_us, 0.85),
        "eager": KernelTarget("eager", times.eager_us / kernel_us, 1.5),
        "compiled": KernelTarget("compiled", times.compiled_us / kernel_us, 1.0),
    }
    return [known[name] for name in names]


def row_of(case: Case, times: KernelTimes, machine: Machine) -> KernelRow:
    moved_us = case.moved_bytes / machine.copy_bytes_per_us
    return KernelRow(
        kernel=case.kernel,
        shape=case.shape,
        dtype=case.dtype,
        peers=case.peers,
        waits=case.waits,
        median_us=times.kernel_us,
        empty_us=machine.empty_us,
        moved_us=moved_us,
        eager_us=times.eager_us,
        compiled_us=times.compiled_us,
        targets=tuple(targets_of(case.targets, times, machine.empty_us, moved_us)),
    )
