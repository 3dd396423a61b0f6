"""The measured matrix: op x bytes x dtype x ranks x rails x impl x algorithm x state."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

OPS = (
    "all_reduce",
    "all_gather",
    "all_gatherv",
    "reduce_scatter",
    "reduce_scatterv",
    "broadcast",
    "gather",
    "all_to_all",
    "all_to_allv",
    "send_recv",
    "barrier",
)
ALL = "all"  # value of --op
# Ops with inputs split evenly into a shard for each rank.
SHARED_OUT = ("reduce_scatter", "all_to_all")
DTYPE_BYTES = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "int32": 4,
    "int64": 8,
}
IMPLS = ("r2ccl", "gloo", "openmpi", "mpich", "floor")
ALGORITHMS = ("auto", "one_shot", "two_shot", "two_shot_overlap")
WITH_ALGORITHMS = ("all_reduce",)
# State: number of failed rails at rank 0. In the state "slow", the first rail has little bandwidth.
STATES = {"healthy": 0, "one-lost": 1, "two-lost": 2, "slow": 0}
MAX_RANKS = 64
MAX_RAILS = 8
MAX_BYTES = 1 << 30
DEFAULT_SIZES = "1KiB..64MiB"

_UNITS = {"": 1, "b": 1, "k": 1 << 10, "kib": 1 << 10, "m": 1 << 20, "mib": 1 << 20, "gib": 1 << 30}
_SIZE = re.compile(r"(\d+)\s*([a-z]*)")
_COUNT = re.compile(r"(\d{1,4})(?:\.\.(\d{1,4}))?")


class OptionError(ValueError):
    """An option has an invalid value; the message names the option and valid values."""


@dataclass(frozen=True)
class Contender:
    """An implementation together with an algorithm of the collective."""

    impl: str
    algorithm: str = "auto"

    @property
    def label(self) -> str:
        return self.impl if self.algorithm == "auto" else f"{self.impl}/{self.algorithm}"


@dataclass(frozen=True)
class CollectiveCall:
    """A collective call: ``bytes`` is the input size of each rank, 0 for a barrier."""

    op: str
    bytes: int
    dtype: str

    def request(self, algorithm: str) -> str:
        """Returns the command sent to the workers; native/worker.hpp describes the protocol."""
        return f"prepare {self.op} {self.dtype} {self.bytes} {algorithm}"


@dataclass(frozen=True)
class Setting:
    """Ranks, rails and state of the rails; each setting has a separate set of worker processes."""

    ranks: int
    rails: int
    state: str = "healthy"

    @property
    def addresses(self) -> tuple[str, ...]:
        """Loopback addresses, a separate address for each rail."""
        return tuple(f"127.0.0.{rail + 1}" for rail in range(self.rails))

    @property
    def lost(self) -> int:
        """Number of failed rails; the failed rails come first in the order of rails."""
        return STATES[self.state]

    @property
    def where(self) -> str:
        """A description for reports, such as "2 ranks, 3 rails, one-lost"."""
        state = "" if self.state == "healthy" else f", {self.state}"
        return f"{self.ranks} ranks, {self.rails} rails{state}"

    def refusal(self) -> str | None:
        """Returns the reason why the setting is impossible, or None.

        A state needs a rail more than the number of lost rails; ``slow`` needs two rails.
        """
        needed = max(self.lost + 1, 2 if self.state == "slow" else 1)
        if self.rails >= needed:
            return None
        return f"--state {self.state} needs at least {needed} rails, not {self.rails}"


@dataclass(frozen=True)
class MatrixOptions:
    """A validated benchmark run. Times are in seconds."""

    ops: tuple[str, ...] = ("all_reduce",)
    sizes: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ("float32",)
    ranks: tuple[int, ...] = (2,)
    rails: tuple[int, ...] = (2,)
    impls: tuple[str, ...] = IMPLS
    algorithms: tuple[str, ...] = ("auto",)
    states: tuple[str, ...] = ("healthy",)
    seconds: float = 1.0
    rounds: int = 5
    iterations: int | None = None

    def __post_init__(self) -> None:
        _choices("--op", self.ops, OPS)
        _choices("--dtype", self.dtypes, tuple(DTYPE_BYTES))
        _choices("--impl", self.impls, IMPLS)
        _choices("--algorithm", self.algorithms, ALGORITHMS)
        _choices("--state", self.states, tuple(STATES))
        for ranks in self.ranks:
            _within("--ranks", ranks, 2, MAX_RANKS)
        for rails in self.rails:
            _within("--rails", rails, 1, MAX_RAILS)
        for state in self.states:
            refusal = Setting(2, max(self.rails), state).refusal()
            if refusal is not None:
                raise OptionError(refusal)
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

    def settings(self) -> Iterator[Setting]:
        """Yields all settings, including impossible settings (see Setting.refusal)."""
        for ranks in self.ranks:
            for rails in self.rails:
                for state in self.states:
                    yield Setting(ranks, rails, state)

    def workloads(self, ranks: int) -> Iterator[CollectiveCall]:
        """Yields the workloads; sizes are rounded up to a whole number of elements per shard."""
        for op in self.ops:
            if op == "barrier":
                yield CollectiveCall(op, 0, self.dtypes[0])
                continue
            for dtype in self.dtypes:
                whole = DTYPE_BYTES[dtype] * (ranks if op in SHARED_OUT else 1)
                for size in self.sizes:
                    yield CollectiveCall(op, -(-size // whole) * whole, dtype)

    def contenders(self, op: str) -> list[Contender]:
        """Returns the contenders for ``op``; only r2ccl's all_reduce has a choice of algorithms."""
        result = []
        for impl in self.impls:
            choice = impl == "r2ccl" and op in WITH_ALGORITHMS
            algorithms = self.algorithms if choice else ("auto",)
            result += [Contender(impl, algorithm) for algorithm in algorithms]
        return result


def parse_ops(values: Sequence[str]) -> tuple[str, ...]:
    """Returns the ops of ``--op``; ``all`` stands for every op."""
    return OPS if ALL in values else tuple(values)


def parse_counts(option: str, values: Sequence[str]) -> tuple[int, ...]:
    """Parses numbers given as ``2``, ``2,4`` or ``2..8``; ascending."""
    counts: set[int] = set()
    for part in (piece.strip() for value in values for piece in value.split(",")):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise OptionError(f"{option} has {part!r}; give numbers like 2, 2,4 or 2..8")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise OptionError(f"{option} {part!r} is an empty range")
        counts.update(range(first, last + 1))
    return tuple(sorted(counts))


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parses sizes given as ``1KiB,4096`` or ``1KiB..64MiB`` (in powers of four).

    Returns bytes in ascending order.
    """
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
    """Formats ``65536`` as ``64 KiB``; a size without a whole number of units stays in bytes."""
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
