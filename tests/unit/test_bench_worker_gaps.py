"""Gaps in the engine's processes: their records, and the verdict over runs; TPOT beside gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from r2serve.bench.serve import against_stock, step_recorder, worker_gaps
from r2serve.bench.serve.step_recorder import FOLDER, RECORD, Recorder

ENGINE = """
class WorkerWrapperBase:
    def execute_model(self, scheduled):
        return "answer"
"""
PROGRAM = """
import os
from vllm.v1.worker.worker_base import WorkerWrapperBase

class Step:
    def __init__(self, *names):
        self.num_scheduled_tokens = dict.fromkeys(names, 1)

worker = WorkerWrapperBase()
for names in ("", "a", "ab", "b"):
    assert worker.execute_model(Step(*names)) == "answer"
if os.fork() == 0:
    worker.execute_model(Step("c"))
    os._exit(0)
os.wait()
print(os.environ["HIDDEN"])
"""


def test_processes_of_an_engine_record_the_ends_of_their_steps(tmp_path: Path) -> None:
    """A fork has records of its own, and another sitecustomize runs, too."""
    module = tmp_path / "engine" / "vllm" / "v1" / "worker" / "worker_base.py"
    module.parent.mkdir(parents=True)
    for folder in (module.parent, *module.parent.parents[:2]):
        (folder / "__init__.py").touch()
    module.write_text(ENGINE)
    hidden = tmp_path / "engine" / "sitecustomize.py"
    hidden.write_text("import os; os.environ['HIDDEN'] = 'ran'\n")
    variables = worker_gaps.variables(tmp_path / "records")
    variables["PYTHONPATH"] = os.pathsep.join(
        [variables["PYTHONPATH"].split(os.pathsep)[0], str(tmp_path / "engine")]
    )
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ran\n"
    files = sorted(Path(variables[FOLDER]).glob("*.steps"), key=lambda path: path.stat().st_size)
    forked, first = (list(worker_gaps.records(path)) for path in files)
    assert len(forked) == 1
    assert len(first) == 3, "a step without requests is no step"
    assert first[0][1] == 0, "the first step of a request has no gap"
    assert first[1][1] == first[1][0] - first[0][0]
    assert first[2][1] == first[2][0] - first[1][0], "the gap of b, and not of a"


def test_a_recorder_forgets_the_oldest_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_recorder, "MOST", 2)
    recorder = Recorder(str(tmp_path))
    for name in ("a", "b", "a", "c", "b", "a"):
        recorder.ended([name])
    [path] = tmp_path.glob("*.steps")
    gaps = [gap for _, gap in worker_gaps.records(path)]
    assert [gap > 0 for gap in gaps] == [False, False, True, False, False, False]


def write(folder: Path, process: int, *steps: tuple[int, int]) -> None:
    path = folder / "steps" / f"{process}.steps"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(RECORD.pack(*step) for step in steps) + b"half")


def test_gaps_of_a_span_are_those_of_all_processes(tmp_path: Path) -> None:
    assert worker_gaps.measured(tmp_path, 0, 100) is None
    ms = 1_000_000
    write(tmp_path, 1, (10 * ms, 9 * ms), (30 * ms, 5 * ms), (40 * ms, 7 * ms), (90 * ms, 80 * ms))
    write(tmp_path, 2, (35 * ms, 8 * ms), (36 * ms, 0), (99 * ms, 30 * ms))
    assert worker_gaps.measured(tmp_path, 20 * ms, 50 * ms) == {
        "longest_ms": 80.0,
        "p50_ms": 7.0,
        "steps": 4,
        "longest_by_process_ms": [80.0, 8.0],
    }


def row(scenario: str, pair: int, longest_ms: float, **requests: int) -> dict[str, Any]:
    counts = {"failed": 0, "never_sent": 0, "wrong": 0} | requests
    gaps = {"worker_gaps": {"longest_ms": longest_ms}}
    about = {"label": "", "contender": "r2ccl", "scenario": scenario, "pair": pair}
    return {**about, **gaps, "requests": counts}


def runs(scenario: str, *longest_ms: float, **requests: int) -> list[dict[str, Any]]:
    return [row(scenario, pair, ms, **requests) for pair, ms in enumerate(longest_ms)]


@pytest.mark.parametrize(
    ("struck", "said"),
    [
        (runs("mgmt-gone", 40, 90, 85, 400, 90), "met"),
        (runs("mgmt-gone", 40, 91, 95, 400, 90), "not reached"),
        (runs("black-hole", 40, 91, 95, 100, 90), "met"),
        (runs("mgmt-gone", 40, 40, 40, 40, 40, failed=1), "not reached"),
        (runs("mgmt-gone", 40, 40, 40, 40, 40, wrong=1), "not reached"),
        (runs("mgmt-gone", 40, 40, 40, 40), "too few to say (5 runs are wanted)"),
    ],
)
def test_the_median_of_runs_is_judged(struck: list[dict[str, Any]], said: str) -> None:
    healthy = runs("healthy", 40, 41, 39, 900, 40)
    [found] = worker_gaps.verdicts([*struck, *healthy, {"not_run": "", "scenario": "healthy"}])
    assert (found.said, found.healthy_ms) == (said, 40)
    assert said in str(found)


def test_without_a_healthy_run_or_a_limit_there_is_no_verdict() -> None:
    assert worker_gaps.verdicts(runs("mgmt-gone", 1, 1)) == []
    assert worker_gaps.verdicts([*runs("slow", 1), *runs("healthy", 1)]) == []
    on_rail = runs("mgmt-is-rail0", 1)
    assert worker_gaps.verdicts([*on_rail, *runs("healthy", 1)]) == []
    [found] = worker_gaps.verdicts([*on_rail, *runs("healthy-on-rail0", 7)])
    assert found.healthy_ms == 7


def undisturbed(label: str, contender: str, pair: int, p50: float | None) -> dict[str, Any]:
    tpot_ms = None if p50 is None else {"p50": p50}
    about = {"label": label, "contender": contender, "pair": pair}
    return {**about, "scenario": "healthy", "tpot_ms": tpot_ms}


def test_time_per_token_is_compared_pair_by_pair() -> None:
    rows = [
        *(undisturbed("sglang", "gloo", pair, 40.0) for pair in range(3)),
        *(undisturbed("sglang", "r2ccl", pair, ms) for pair, ms in enumerate((32.0, 34.0, 90.0))),
        undisturbed("sglang", "r2ccl", 3, 10.0),
        undisturbed("", "r2ccl", 0, 10.0),
        undisturbed("", "gloo", 0, None),
        {"not_run": "no bird", "scenario": "healthy"},
    ]
    [found] = against_stock.ratios(rows)
    assert (found.label, found.pairs, found.ratio) == ("sglang", 3, 0.85)
    assert (found.lowest, found.highest) == (0.8, 2.25)
    assert "r2ccl / gloo: 0.850 (0.800 to 2.250 over 3 pairs)" in str(found)
