"""The plan of the random collectives, derived by every rank from the seed alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from canonical import DTYPES, OPS, SIZE

KINDS = (
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
_WEIGHTS = np.array([5, 2, 2, 2, 2, 2, 2, 2, 2, 3, 1]) / 25
_REDUCES = ("all_reduce", "reduce_scatter", "reduce_scatterv")

# Bytes per rank: most calls are small, some have many chunks, a few have several messages.
_CLASSES = ((0, 1), (1, 4 << 10), (4 << 10, 64 << 10), (64 << 10, 512 << 10), (1 << 19, 3 << 20))
_SHARES = (0.05, 0.55, 0.30, 0.09, 0.01)


@dataclass(frozen=True)
class Step:
    """A collective.

    `rows[r][s]` is the number of rows from rank r to rank s in an all_to_all. Other collectives use
    only `rows[0]` or `rows[0][0]`. A row has `width` elements.
    """

    number: int
    group: int
    kind: str
    dtype: str
    op: str
    width: int
    rows: list[list[int]]
    root: int
    other: int
    in_place: bool
    as_numpy: bool
    algorithm: str | None = field(default=None)


def make_groups(seed: int, processes: int, count: int) -> list[list[int]]:
    """Returns the members of each communicator in rank order.

    The first two communicators have all processes as members.
    """
    random = np.random.default_rng([seed, 1])
    everybody = list(range(processes))
    groups = [everybody, [int(p) for p in random.permutation(processes)]]
    sizes = [*range(1, processes), 2, 3]
    for index in range(count - 2):
        size = sizes[index % len(sizes)]
        groups.append([int(p) for p in random.permutation(processes)[:size]])
    return groups


def make_step(seed: int, number: int, groups: list[list[int]]) -> Step:
    random = np.random.default_rng([seed, 2, number])
    group = int(random.integers(len(groups)))
    ranks = len(groups[group])
    kind = str(random.choice(KINDS, p=_WEIGHTS))
    if kind == "send_recv" and ranks == 1:
        kind = "broadcast"
    dtype = DTYPES[random.integers(len(DTYPES))]
    op = OPS[random.integers(len(OPS))]
    if dtype == "bool" and op == "avg":
        op = "max"
    low, high = _CLASSES[random.choice(len(_CLASSES), p=_SHARES)]
    size = 0 if high == 1 else int(low * (high / low) ** random.random())
    width = int(random.integers(1, 6))
    total = size // (SIZE[dtype] * width)
    root, other = 0, 0
    if ranks > 1:
        root, other = (int(r) for r in random.choice(ranks, 2, replace=False))
    return Step(
        number=number,
        group=group,
        kind=kind,
        dtype=dtype,
        op=op,
        width=width,
        rows=_rows(random, kind, ranks, total),
        root=root,
        other=other,
        in_place=bool(random.random() < 0.4),
        as_numpy=bool(dtype != "bfloat16" and random.random() < 0.3),
        algorithm=(None, "one_shot", "two_shot")[random.integers(3)],
    )


def _rows(random: np.random.Generator, kind: str, ranks: int, total: int) -> list[list[int]]:
    if kind in ("all_gatherv", "reduce_scatterv"):
        return [_split(random, ranks, total)]
    if kind == "all_to_allv":
        return [_split(random, ranks, total) for _ in range(ranks)]
    if kind in ("reduce_scatter", "all_to_all"):
        return [[total // ranks] * ranks] * ranks
    return [[total] * ranks]


def _split(random: np.random.Generator, ranks: int, total: int) -> list[int]:
    """Splits `total` into uneven parts; some parts are empty."""
    weights = random.random(ranks) * (random.random(ranks) < 0.85)
    if weights.sum() == 0:
        return [0] * ranks
    return [int(part) for part in total * weights / weights.sum()]
