"""``r2serve topo`` and ``r2serve doctor`` on a node with RDMA devices."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rails import rails

from r2serve.cli.topo import check, topo


@pytest.fixture(autouse=True)
def _three_rails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R2CCL_RAILS", "rxe_n0r0:1,n0r1,rxe_n0r2")


def run(*arguments: str) -> Result:
    command, *options = arguments
    tool = {"topo": topo, "doctor": check}[command]
    return CliRunner().invoke(tool, options, catch_exceptions=False)


def test_topo_lists_the_rdma_rails(show: Callable[[str], None], tmp_path: Path) -> None:
    picture = tmp_path / "node.svg"
    node = json.loads(run("topo", "--json", "--picture", str(picture)).output)
    assert node["libibverbs"] == "ok"
    by_rail = {nic["rail"]: nic for nic in node["nics"] if nic["rail"]}
    assert [by_rail[f"rail{i}"]["name"] for i in range(3)] == ["n0r0", "n0r1", "n0r2"]
    for i in range(3):
        nic = by_rail[f"rail{i}"]
        assert (nic["kind"], nic["rdma"], nic["rdma_state"]) == ("verbs", f"rxe_n0r{i}:1", "ACTIVE")
        assert nic["gid"] == f"1 (RoCE v2, 10.{i}.0.1)"
        assert nic["verbs"]["active_mtu"] == 4096
    assert [step["rail"] for step in node["chains"][0]["steps"]] == ["rail0", "rail1", "rail2"]
    assert "rxe_n0r0:1" in picture.read_text()
    for line in run("topo").output.splitlines():
        show(line)


def test_doctor_reports_a_downed_nic(show: Callable[[str], None]) -> None:
    healthy = run("doctor")
    assert healthy.exit_code == 0, healthy.output
    for line in healthy.output.splitlines():
        show(line)
    rails("down", "n0r1")
    try:
        sick = run("doctor", "--json")
    finally:
        rails("up", "n0r1")
    assert sick.exit_code == 1
    [failure] = [finding for finding in json.loads(sick.output) if finding["level"] == "failure"]
    assert failure["check"] == "link"
    assert "n0r1" in failure["text"]
