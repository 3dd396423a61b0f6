"""Longest gaps between the steps of a request, measured in the engine's processes.

Gaps at the clients contain delays of the API server and of the clients themselves, so that two
runs without a fault differ by more than a limit of 50 ms. Processes of the engine record the ends
of their steps (:mod:`r2serve.bench.serve.step_recorder`), under every contender alike.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r2serve.bench.collectives.statistics import median
from r2serve.bench.serve import step_recorder
from r2serve.bench.serve.step_recorder import FOLDER, RECORD

Row = Mapping[str, Any]

HEALTHY = "healthy"
HEALTHY_OF = {"mgmt-is-rail0": "healthy-on-rail0"}
"""Scenario without faults on the same nodes, where the nodes differ from those of ``healthy``."""
MARGIN_MS = {
    "carrier-loss": 60.0,
    "black-hole": 60.0,
    "mgmt-carrier-loss": 50.0,
    "mgmt-gone": 50.0,
    "mgmt-black-hole": 50.0,
    "mgmt-flap": 50.0,
    "mgmt-reset": 50.0,
    "mgmt-then-rail": 50.0,
    "mgmt-is-rail0": 50.0,
}
"""Allowed excess of the longest gap over ``healthy``, in ms, by scenario."""
WANTED_RUNS = 5


def variables(folder: Path) -> dict[str, str]:
    """Prepares a folder for records; returns the variables of an engine's processes."""
    site, records = folder / "site", folder / "steps"
    for each in (site, records):
        each.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(step_recorder.__file__, site / "sitecustomize.py")
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {FOLDER: str(records), "PYTHONPATH": os.pathsep.join(paths)}


def measured(folder: Path, begin_ns: int, end_ns: int) -> dict[str, Any] | None:
    """Returns the gaps that overlap a span of CLOCK_MONOTONIC, in ms; None without a record.

    folder: as of :func:`variables`. The longest gap is the one of all processes, the median is over
    all steps of all processes.
    """
    of_process = {
        path.stem: [
            gap_ns / 1e6
            for ended_ns, gap_ns in records(path)
            if gap_ns > 0 and ended_ns > begin_ns and ended_ns - gap_ns < end_ns
        ]
        for path in sorted((folder / "steps").glob("*.steps"))
    }
    kept = {process: gaps for process, gaps in of_process.items() if gaps}
    if not kept:
        return None
    every = [gap for gaps in kept.values() for gap in gaps]
    return {
        "longest_ms": round(max(every), 3),
        "p50_ms": round(median(every), 3),
        "steps": len(every),
        "longest_by_process_ms": [round(max(gaps), 3) for gaps in kept.values()],
    }


def records(path: Path) -> Iterator[tuple[int, int]]:
    """Yields the records of a process, without the unfinished record of a killed process."""
    data = path.read_bytes()
    yield from RECORD.iter_unpack(data[: len(data) - len(data) % RECORD.size])


@dataclass(frozen=True)
class GapResult:
    """The longest gap of a scenario beside ``healthy``, medians over the runs, in ms.

    lost, wrong: requests of all runs of the scenario. said: the verdict in words.
    """

    scenario: str
    contender: str
    runs: int
    gap_ms: float
    healthy_ms: float
    margin_ms: float
    lost: int
    wrong: int
    said: str

    def __str__(self) -> str:
        return (
            f"longest gap in the workers, {self.scenario}, {self.contender}: {self.gap_ms:.0f} ms, "
            f"healthy {self.healthy_ms:.0f} ms, wanted at most {self.margin_ms:.0f} ms more and no "
            f"request lost or wrong ({self.lost} and {self.wrong}): {self.said} "
            f"(medians of {self.runs} runs)"
        )


def verdicts(rows: Sequence[Row]) -> list[GapResult]:
    """Returns a result for each label, contender and scenario of MARGIN_MS with measured gaps."""
    found = []
    known = [row for row in rows if row.get("worker_gaps")]
    for about in dict.fromkeys((row["label"], row["contender"]) for row in known):
        mine = [row for row in known if (row["label"], row["contender"]) == about]
        by_scenario: dict[str, list[Row]] = defaultdict(list)
        for row in mine:
            by_scenario[row["scenario"]].append(row)
        for scenario in MARGIN_MS:
            struck = by_scenario.get(scenario)
            healthy = by_scenario.get(HEALTHY_OF.get(scenario, HEALTHY))
            if struck and healthy:
                found.append(_judge(scenario, about[1], struck, healthy))
    return found


def _judge(
    scenario: str, contender: str, struck: Sequence[Row], healthy: Sequence[Row]
) -> GapResult:
    gap_ms, healthy_ms = map(_median_ms, (struck, healthy))
    lost = sum(row["requests"]["failed"] + row["requests"]["never_sent"] for row in struck)
    wrong = sum(row["requests"]["wrong"] or 0 for row in struck)
    runs = min(len(struck), len(healthy))
    margin_ms = MARGIN_MS[scenario]
    failed = lost or wrong or gap_ms > healthy_ms + margin_ms
    said = "not reached" if failed else "met"
    if runs < WANTED_RUNS:
        said = f"too few to say ({WANTED_RUNS} runs are wanted)"
    return GapResult(scenario, contender, runs, gap_ms, healthy_ms, margin_ms, lost, wrong, said)


def _median_ms(rows: Sequence[Row]) -> float:
    return median([row["worker_gaps"]["longest_ms"] for row in rows])
