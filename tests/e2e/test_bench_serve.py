"""`r2serve bench serve` with real engines: the same requests under a carrier loss."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from r2serve.lab.holder import LabUnavailableError
from r2serve.lab.lab import Lab

SERVE = [sys.executable, "-c", "from r2serve.cli import main; main()", "bench", "serve"]
# Upper bound of a gap with r2ccl; the carrier is lost for 8 s.
LONGEST_GAP_MS = 5000

pytestmark = [
    pytest.mark.long,
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


def carrier_loss(out: Path, *contenders: str) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Runs the command; returns the command and the rows by contender."""
    command = [*SERVE, "--scenario", "carrier-loss", "--requests", "30", "--rate", "2.5"]
    command += [word for each in contenders for word in ("--contender", each)]
    command += ["--patience", "15", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (out / "rows.jsonl").read_text().splitlines()
    rows = {row["contender"]: row for row in map(json.loads, lines)}
    assert not [row["not_run"] for row in rows.values() if "not_run" in row]
    assert [row["requests"]["sent"] for row in rows.values()] == [30] * len(contenders)
    return command, rows


def test_a_carrier_loss_loses_no_request(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command, rows = carrier_loss(out, "r2ccl")
    ours = rows["r2ccl"]
    assert ours["requests"]["failed"] == ours["requests"]["wrong"] == 0
    [fault] = ours["faults"]
    assert 4 <= fault["at_s"] < 7  # finding the rail in use takes time
    assert fault["healed_at_s"] == pytest.approx(12, abs=2)
    assert ours["longest_gap_ms"] < LONGEST_GAP_MS

    # The sidecar and the client both report the stalled requests.
    assert "not_run" not in ours["impact"]
    for waited in ours["impact"]["requests"]:
        apart = abs(waited["sidecar_ms"] - waited["client_ms"])
        assert apart < 500 + 0.2 * waited["sidecar_ms"]  # closer if each process has a core

    page = (out / "index.html").read_text()
    assert page.count("data:image/png;base64,") >= 2
    assert not re.search(r"(?:src|href)=\"(?!data:)", page)

    again = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "nothing to do" in again.stderr
    assert len((out / "rows.jsonl").read_text().splitlines()) == 1


def test_a_carrier_loss_delays_gloo_more_than_r2ccl(tmp_path: Path) -> None:
    _, rows = carrier_loss(tmp_path / "out", "r2ccl", "gloo")
    ours, stock = rows["r2ccl"], rows["gloo"]
    # The stock communicator waits for the carrier, or fails.
    assert stock["requests"]["failed"] > 0 or stock["longest_gap_ms"] > 6000
    assert ours["requests"]["failed"] == 0
    assert ours["longest_gap_ms"] < LONGEST_GAP_MS


def test_faults_of_the_management_nic_lose_no_request(tmp_path: Path) -> None:
    names = ("mgmt-gone", "mgmt-black-hole", "mgmt-reset", "mgmt-then-rail", "mgmt-is-rail0")
    path = tmp_path / "rows.jsonl"
    command = [*SERVE, "--requests", "30", "--rate", "2.5", "--json", str(path)]
    command += [word for name in names for word in ("--scenario", name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = list(map(json.loads, path.read_text().splitlines()))
    assert [row["scenario"] for row in rows if "not_run" not in row] == list(names)
    for row in rows:
        requests = row["requests"]
        assert (requests["sent"], requests["failed"], requests["wrong"]) == (30, 0, 0), row
        assert row["longest_gap_ms"] < LONGEST_GAP_MS, row["scenario"]


def test_a_supervisor_restarts_a_hung_engine_without_lost_requests(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    command = [*SERVE, "--contender", "restart", "--scenario", "carrier-loss", "--json", str(path)]
    command += ["--requests", "30", "--rate", "2.5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [row] = map(json.loads, path.read_text().splitlines())
    assert row["restarts"] >= 1
    assert row["requests"]["sent_again"] > 0
    assert row["requests"]["failed"] == row["requests"]["wrong"] == 0
