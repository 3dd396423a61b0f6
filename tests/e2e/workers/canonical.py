"""The canonical reduction and random elements in NumPy: the reference of the random collectives.

The code follows the rules of docs/architecture.md and shares no code with the core.  Arrays are raw
bytes (uint8); `name` is the name of a torch dtype.
"""

from __future__ import annotations

from typing import Any

import numpy as np

DTYPES = (
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "int8",
    "uint8",
    "int32",
    "int64",
    "bool",
)
FLOATS = DTYPES[:4]
OPS = ("sum", "prod", "min", "max", "avg")
SIZE = dict(zip(DTYPES, (2, 2, 4, 8, 1, 1, 4, 8, 1), strict=True))

_NAN: dict[str, tuple[Any, int]] = {
    "float16": (np.uint16, 0x7E00),
    "bfloat16": (np.uint16, 0x7FC0),
    "float32": (np.uint32, 0x7FC00000),
    "float64": (np.uint64, 0x7FF8000000000000),
}


def random_bytes(random: np.random.Generator, name: str, count: int) -> np.ndarray:
    """Returns random elements; some round, overflow, cancel or are denormal, infinite or NaN."""
    raw = np.frombuffer(random.bytes(count * SIZE[name]), np.uint8)
    if name == "bool":
        return raw & 1
    if name not in FLOATS or random.random() < 0.25:
        return raw.copy()
    values = random.standard_normal(count) * 2.0 ** random.integers(-20, 12)
    return _narrow(values.astype(np.float64 if name == "float64" else np.float32), name)


def reduce(name: str, op: str, inputs: list[np.ndarray], nodes: list[int]) -> np.ndarray:
    """Reduces the ranks of each node in rank order, then the nodes in order of first appearance."""
    total: np.ndarray | None = None
    with np.errstate(all="ignore"):
        for node in dict.fromkeys(nodes):
            ranks = [rank for rank, other in enumerate(nodes) if other == node]
            partial = _widen(inputs[ranks[0]], name)
            for rank in ranks[1:]:
                partial = _combine(op, partial, _widen(inputs[rank], name))
            if len(ranks) > 1:
                partial = _widen(_narrow(partial, name), name)
            total = partial if total is None else _combine(op, total, partial)
        assert total is not None, "no ranks"
        if op == "avg":
            total = _divide(total, len(nodes))
        return _narrow(total, name)


def _widen(raw: np.ndarray, name: str) -> np.ndarray:
    if name == "float16":
        return raw.view(np.float16).astype(np.float32)
    if name == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view(np.dtype(name))


def _narrow(values: np.ndarray, name: str) -> np.ndarray:
    """Converts to the dtype as bytes: nearest, ties to even, with a single bit pattern for NaN."""
    if name == "bfloat16":
        bits = values.view(np.uint32)
        out = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    else:
        out = values.astype(np.dtype(name))
    if name in _NAN:
        kind, pattern = _NAN[name]
        out = np.where(np.isnan(values), kind(pattern), out.view(kind))
    return np.ascontiguousarray(out).view(np.uint8)


def _combine(op: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype == np.bool_:
        return a | b if op in ("sum", "max") else a & b
    if op in ("sum", "avg"):
        return a + b
    if op == "prod":
        return a * b
    if a.dtype.kind != "f":
        return np.minimum(a, b) if op == "min" else np.maximum(a, b)
    below = (a < b) | ((a == b) & np.signbit(a) & ~np.signbit(b))
    chosen = np.where(below == (op == "min"), a, b)
    return np.where(np.isnan(a) | np.isnan(b), a.dtype.type(np.nan), chosen)


def _divide(total: np.ndarray, ranks: int) -> np.ndarray:
    """Divides by the number of ranks; integers are truncated towards zero."""
    if total.dtype.kind == "f":
        return total / total.dtype.type(ranks)
    wide = total.astype(np.int64)
    quotient = wide // ranks
    quotient += (wide % ranks != 0) & (wide < 0)
    return quotient.astype(total.dtype)
