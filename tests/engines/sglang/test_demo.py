"""`r2serve demo --engine sglang`: the report, as `make demo-sglang` makes it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from demo_reports import check_report
from sglang_environment import BIN, python

WHOLE_S = 1500.0

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.mark.usefixtures("machine_with_a_lab")
def test_every_request_survives_the_faults(tmp_path: Path, show: Callable[[str], None]) -> None:
    python()
    report = tmp_path / "report.json"
    command = [str(BIN / "r2serve"), "demo", "--engine", "sglang", "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WHOLE_S, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    data = json.loads(report.read_text(encoding="utf-8"))
    check_report(data, sent=8)
    management = data["management"]
    assert management["longest_gap_ms"] < 1e3 * management["away_s"]
    show(
        f"decode step {data['decode_step_ms']:.1f} ms; without the management NIC for "
        f"{management['away_s']:.1f} s the longest gap was {management['longest_gap_ms']:.0f} ms"
    )
    assert "starting sglang serve" in done.stdout + done.stderr
