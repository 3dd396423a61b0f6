"""What is measured: the matrix op x bytes x dtype x ranks x rails x impl x algorithm x state."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
DTYPE_BYTES = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "int32": 4,
    "int64": 8,
}
IMPLS = ("r2ccl", "gloo", "openmpi", "floor")
ALGORITHMS = ("auto", "one_shot", "two_shot")
MAX_RANKS = 64
MAX_RAILS = 8
MAX_BYTES = 1 << 30
DEFAULT_SIZES = "1KiB..64MiB"

_UNITS = {"": 1, "b": 1, "k": 1 << 10, "kib": 1 << 10, "m": 1 << 20, "mib": 1 << 20, "gib": 1 << 30}
_SIZE = re.compile(r"(\d+)\s*([a-z]*)")


class OptionError(ValueError):
    """An option whose value makes no benchmark; names the option and what would be right."""


@dataclass(frozen=True)
class Contender:
    """One implementation with one way of doing the collective."""

    impl: str
    algorithm: str = "auto"

    @property
    def label(self) -> str:
        return self.impl if self.algorithm == "auto" else f"{self.impl}/{self.algorithm}"


@dataclass(frozen=True)
class Workload:
    """One collective call: ``bytes`` is the size of the input of each rank."""

    op: str
    bytes: int
    dtype: str

    def request(self, algorithm: str) -> str:
        """The worker's command for it (see native/worker.hpp)."""
        return f"prepare {self.op} {self.dtype} {self.bytes} {algorithm}"


@dataclass(frozen=True)
class Setting:
    """What worker processes are started for."""

    ranks: int
    rails: int
    state: str = "healthy"

    @property
    def addresses(self) -> tuple[str, ...]:
        """One loopback address a rail."""
        return tuple(f"127.0.0.{rail + 1}" for rail in range(self.rails))


@dataclass(frozen=True)
class Options:
    """A validated benchmark run. Times are in seconds."""

    ops: tuple[str, ...] = ("all_reduce",)
    sizes: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ("float32",)
    ranks: tuple[int, ...] = (2,)
    rails: tuple[int, ...] = (2,)
    impls: tuple[str, ...] = IMPLS
    algorithms: tuple[str, ...] = ("auto",)
    seconds: float = 1.0
    rounds: int = 5
    iterations: int | None = None

    def __post_init__(self) -> None:
        _choices("--op", self.ops, OPS)
        _choices("--dtype", self.dtypes, tuple(DTYPE_BYTES))
        _choices("--impl", self.impls, IMPLS)
        _choices("--algorithm", self.algorithms, ALGORITHMS)
        for ranks in self.ranks:
            _within("--ranks", ranks, 2, MAX_RANKS)
        for rails in self.rails:
            _within("--rails", rails, 1, MAX_RAILS)
        _within("--seconds", self.seconds, 0.01, 3600)
        _within("--rounds", self.rounds, 1, 1000)
        if self.iterations is not None:
            _within("--iterations", self.iterations, self.rounds, 10_000_000)
        if not self.sizes:
            raise OptionError("--sizes is empty; give sizes like 1KiB,64KiB or 1KiB..64MiB")
        for size in self.sizes:
            _within("--sizes", size, 1, MAX_BYTES)
            self._divisible(size)

    def _divisible(self, size: int) -> None:
        for dtype in self.dtypes:
            if size % DTYPE_BYTES[dtype]:
                raise OptionError(f"--sizes {size} is no whole number of {dtype} elements")
            for ranks in self.ranks:
                if "reduce_scatter" in self.ops and size % (DTYPE_BYTES[dtype] * ranks):
                    raise OptionError(
                        f"--sizes {size} does not divide into {ranks} ranks' shares of {dtype} "
                        "elements, which reduce_scatter needs"
                    )

    def settings(self) -> Iterator[Setting]:
        for ranks in self.ranks:
            for rails in self.rails:
                yield Setting(ranks, rails)

    def workloads(self) -> Iterator[Workload]:
        for op in self.ops:
            for dtype in self.dtypes:
                for size in self.sizes:
                    yield Workload(op, size, dtype)

    def contenders(self) -> list[Contender]:
        """Only r2ccl lets the caller choose the algorithm."""
        result = []
        for impl in self.impls:
            algorithms = self.algorithms if impl == "r2ccl" else ("auto",)
            result += [Contender(impl, algorithm) for algorithm in algorithms]
        return result


def parse_sizes(text: str) -> tuple[int, ...]:
    """Sizes in bytes from ``1KiB,4096`` or, by powers of four, ``1KiB..64MiB``; ascending."""
    sizes: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        first, dots, last = part.partition("..")
        if not dots:
            sizes.add(_parse_size(part))
            continue
        size, end = _parse_size(first), _parse_size(last)
        if size == 0 or size > end:
            raise OptionError(f"--sizes {part!r} is an empty range")
        while size <= end:
            sizes.add(size)
            size *= 4
    return tuple(sorted(sizes))


def format_size(size: int) -> str:
    """``65536`` as ``64 KiB``; sizes that are no whole number of units stay in bytes."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor and size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"


def _parse_size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise OptionError(f"--sizes has {text!r}; give bytes, KiB, MiB or GiB, for example 64KiB")
    return int(match[1]) * _UNITS[match[2]]


def _choices(option: str, values: tuple[str, ...], known: tuple[str, ...]) -> None:
    if not values:
        raise OptionError(f"{option} is empty; known: {', '.join(known)}")
    for value in values:
        if value not in known:
            raise OptionError(f"{option} has {value!r}; known: {', '.join(known)}")


def _within(option: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise OptionError(f"{option} is {value}; it must be from {low} to {high}")
