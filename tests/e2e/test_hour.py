"""`r2serve demo hour`: a real engine under a schedule of faults loses no request and no token."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from r2serve.lab.holder import LabUnavailableError
from r2serve.lab.kinds import KINDS
from r2serve.lab.lab import Lab

HOUR = [sys.executable, "-c", "from r2serve.cli import main; main()", "demo", "hour"]
# Upper bound of a stall. Without any rail, a collective waits for the switch to the management NIC,
# but never for the return of a rail.
WORST_STALL_MS = 5000.0

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.usefixtures("forked_vllm"),
]


@pytest.fixture(autouse=True)
def machine_with_a_lab() -> None:
    try:
        with Lab(nodes=1, rails=1):
            return
    except LabUnavailableError as error:
        pytest.skip(f"no lab on this machine: {error}")


def play(tmp_path: Path, timeout_s: float, *options: str) -> tuple[dict[str, Any], str]:
    """Runs the hour or a part; returns the report and the last line of the output."""
    report = tmp_path / "report.json"
    command = [*HOUR, "--json", str(report), *options]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    data: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return data, done.stdout.splitlines()[-1]


def check(data: dict[str, Any], least_faults: int, least_requests: int) -> None:
    requests = data["requests"]
    assert requests["failed"] == 0
    assert requests["completed"] == requests["sent"] >= least_requests
    assert data["wrong_tokens"] == 0
    assert data["tokens"] >= requests["sent"] * min(data["tokens_per_request"])
    faults = data["faults"]
    assert len(faults) == data["planned_faults"] >= least_faults
    of_rails = [one for one in faults if one["rails"]]
    unseen = [one for one in of_rails if KINDS[one["kind"]].leaves_up and not one["noticed"]]
    assert not unseen
    assert all(fault["back_after_ms"] is not None for fault in faults)
    # A third of the faults of rails or more must stall a collective.
    hit = [fault for fault in of_rails if fault["stalls_ms"]]
    assert len(hit) >= len(of_rails) / 3, [fault["label"] for fault in hit]
    assert data["worst_stall_ms"] < WORST_STALL_MS
    assert data["passed"] is True


@pytest.mark.long
@pytest.mark.timeout(900)
def test_half_a_minute_of_faults(tmp_path: Path, show: Callable[[str], None]) -> None:
    data, line = play(tmp_path, 840, "--seconds", "26", "--seed", "7")
    show(line)
    check(data, least_faults=4, least_requests=8)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [2, 4])
def test_an_hour_of_faults(tmp_path: Path, ranks: int, show: Callable[[str], None]) -> None:
    data, line = play(tmp_path, 1100, "--tensor-parallel-size", str(ranks), "--seed", str(ranks))
    show(f"TP={ranks}, {line}")
    check(data, least_faults=40, least_requests=100 if ranks == 2 else 30)
    assert {fault["kind"] for fault in data["faults"]} == set(KINDS)
    assert len([fault for fault in data["faults"] if not fault["rails"]]) >= 4  # management NIC
    outages = [fault for fault in data["faults"] if fault["label"].endswith("all rails")]
    assert [fault["duration_s"] for fault in outages] == [8.0]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_without_a_fallback_requests_wait_for_a_rail(tmp_path: Path) -> None:
    """While two faults leave no rail, collectives wait, and continue after the first rejoin."""
    data, _ = play(tmp_path, 560, "--no-fallback", "--seconds", "26")
    check(data, least_faults=4, least_requests=8)
    second = [fault for fault in data["faults"] if "second" in fault["label"]]
    # The client's gap is used: in the journal, any arrival starts a new stall, even the echo of a
    # probe over the management NIC.
    assert max(fault["worst_gap_ms"] for fault in second) > 700
