"""Time per token with r2ccl beside the engine's own communicator, in undisturbed runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from r2serve.bench.collectives.statistics import median

Row = Mapping[str, Any]

OURS, STOCK = "r2ccl", "gloo"
SCENARIO = "healthy"


@dataclass(frozen=True)
class StockRatio:
    """TPOT with r2ccl / TPOT with gloo: the median over pairs of runs of the medians."""

    label: str
    pairs: int
    ratio: float
    lowest: float
    highest: float

    def __str__(self) -> str:
        return (
            f"TPOT median, {SCENARIO}, {OURS} / {STOCK}: {self.ratio:.3f} "
            f"({self.lowest:.3f} to {self.highest:.3f} over {self.pairs} pairs)"
        )


def ratios(rows: Sequence[Row]) -> list[StockRatio]:
    """Returns a ratio for each label with undisturbed runs of both contenders."""
    tpot_ms = {
        (row["label"], row["contender"], row["pair"]): row["tpot_ms"]["p50"]
        for row in rows
        if row["scenario"] == SCENARIO and row.get("tpot_ms")
    }
    found = []
    for label in dict.fromkeys(label for label, _, _ in tpot_ms):
        each = [
            ours_ms / tpot_ms[label, STOCK, pair]
            for (of, contender, pair), ours_ms in tpot_ms.items()
            if of == label and contender == OURS and (label, STOCK, pair) in tpot_ms
        ]
        if each:
            found.append(StockRatio(label, len(each), median(each), min(each), max(each)))
    return found
