"""`r2serve bench serve --engine sglang`: requests and tokens through faults, beside gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sglang_environment import BIN, python

SERVE = [sys.executable, "-c", "from r2serve.cli import main; main()", "bench", "serve"]
SCENARIOS = ("healthy", "black-hole", "mgmt-gone")

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.mark.usefixtures("machine_with_a_lab")
def test_faults_lose_no_request_and_change_no_token(tmp_path: Path) -> None:
    python()
    path = tmp_path / "rows.jsonl"
    command = [*SERVE, "--engine", "sglang", "--contender", "r2ccl", "--contender", "gloo"]
    command += [word for name in SCENARIOS for word in ("--scenario", name)]
    command += ["--requests", "24", "--rate", "2", "--json", str(path)]
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=1700, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = list(map(json.loads, path.read_text().splitlines()))
    assert not [row["not_run"] for row in rows if "not_run" in row]
    assert {row["label"] for row in rows} == {"sglang"}
    assert {(row["scenario"], row["contender"]) for row in rows} == {
        (scenario, contender) for scenario in SCENARIOS for contender in ("r2ccl", "gloo")
    }
    for row in rows:
        assert row["requests"]["wrong"] == 0, row
        assert row["contender"] == "gloo" or row["requests"]["failed"] == 0, row
