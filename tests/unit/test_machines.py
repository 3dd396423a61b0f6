"""Start line and `doctor` of each machine of a field case."""

from __future__ import annotations

import subprocess
from pathlib import Path

import machines
import pytest


class Machine:
    """This machine, as a node of a lab; its doctor finds a problem."""

    def __init__(self, folder: Path) -> None:
        self._doctor = folder / "doctor"
        self._doctor.write_text("echo problem of $R2CCL_RAILS; echo; echo fix; exit 1\n")

    def run(self, *argv: str) -> str:
        *before, _, _, _ = argv  # instead of Python
        command = [*before, "sh", str(self._doctor)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_each_machine_has_its_start_line_and_what_doctor_says(tmp_path: Path) -> None:
    log = ["something else", "rails: eth0 (10.0.0.1); not used: none"]
    shown: list[str] = []
    nodes = [Machine(tmp_path), Machine(tmp_path)]
    machines.show(shown.append, nodes, lambda: [log, []], "eth0,eth1")
    assert shown == [
        "node 0: start: rails: eth0 (10.0.0.1); not used: none",
        "node 0: doctor: problem of eth0,eth1",
        "node 0: doctor: fix",
        "node 1: start: ",
        "node 1: doctor: problem of eth0,eth1",
        "node 1: doctor: fix",
    ]


def test_other_runs_ask_no_machine(tmp_path: Path) -> None:
    def logs() -> list[list[str]]:
        pytest.fail("asked a rank for its log")

    machines.show(None, [Machine(tmp_path)], logs, "auto")
