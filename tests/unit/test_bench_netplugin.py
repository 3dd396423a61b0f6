"""`r2serve bench netplugin`: targets of its points, a whole run, and runs that fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from r2serve.bench.netplugin import targets
from r2serve.bench.netplugin.cli import command

SIZES = (8, 1024, 4096, 16_384, 65_536)


def one_way(size: int = 8, plugin_us: float = 10.0) -> dict[str, Any]:
    point = {"what": "one_way", "bytes": size, "plugin_us": plugin_us, "plugin_p99_us": 30.0}
    return point | {"floor_us": 8.0, "target_us": 11.0}


def bandwidth(plugin: float = 900.0) -> dict[str, Any]:
    return {"what": "bandwidth", "bytes": 2**20, "plugin_mib_s": plugin, "floor_mib_s": 1000.0}


def idle(rail: str = "shm", ns: float = 100.0) -> dict[str, Any]:
    return {"what": "idle_test", "rail": rail, "ns": ns}


def connections(**more: float) -> dict[str, Any]:
    point = {"what": "connections", "count": 512, "start_s": 2.0, "kib_each": 64.0}
    return point | {"one_way_us": 11.0, "alone_us": 10.0} | more


def stall(fault: str, p99_ms: float) -> dict[str, Any]:
    return {"what": "stall", "fault": fault, "faults": 100, "p50_ms": 1.0, "p99_ms": p99_ms}


WHOLE = [
    *map(one_way, SIZES),
    bandwidth(),
    idle("tcp", 5000.0),
    idle(),
    connections(),
    stall("", 3.0),
    stall("carrier_loss", 10.0),
    stall("black_hole", 50.0),
]


@pytest.mark.parametrize(
    ("point", "met"),
    [
        (one_way(plugin_us=11.0), True),
        (one_way(plugin_us=11.01), False),
        (bandwidth(901.0), True),
        (bandwidth(899.0), False),
        (idle(), True),
        (idle(ns=101.0), False),
        (idle("tcp", 1e6), None),
        (stall("", 1e6), None),
        (stall("carrier_loss", 10.1), False),
        (stall("black_hole", 50.0), True),
        (stall("black_hole", 50.1), False),
        (connections(), True),
        (connections(kib_each=64.1), False),
        (connections(start_s=2.1), False),
        (connections(one_way_us=11.1), False),
    ],
)
def test_targets(point: dict[str, Any], met: bool | None) -> None:
    found = targets.judged(json.dumps(point))
    assert found["met"] is met
    assert bool(found["misses"]) == (met is False)


def run(tmp_path: Path, points: list[Any], *words: str, status: int = 0) -> Result:
    """Runs the command with a program that prints the points."""
    program = tmp_path / "net_bench"
    lines = "\n".join(each if isinstance(each, str) else json.dumps(each) for each in points)
    program.write_text(
        f"#!{sys.executable}\nimport sys\nassert sys.argv[1:] == ['20', '3']\n"
        f"print({lines!r})\nsys.exit({status})\n"
    )
    program.chmod(0o755)
    options = ["--program", str(program), "--rounds", "20", "--faults", "3"]
    return CliRunner().invoke(command, [*options, *words])


def test_a_whole_run_prints_and_keeps_each_point(tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    result = run(tmp_path, WHOLE, "--json", str(kept))
    assert result.exit_code == 0, result.output
    printed = [json.loads(line) for line in result.stdout.splitlines()]
    assert [{k: v for k, v in each.items() if k not in ("met", "misses")} for each in printed] == (
        WHOLE
    )
    metadata, *rows = [json.loads(line) for line in kept.read_text().splitlines()]
    assert rows == printed
    assert "machine" in metadata["metadata"]


def test_a_missed_target_is_named_in_the_end(tmp_path: Path) -> None:
    result = run(tmp_path, [*WHOLE[:-1], stall("black_hole", 60.0)])
    assert result.exit_code == 1
    assert "('stall', 'black_hole'): p99_ms is 60: must be at most 50" in result.stderr


@pytest.mark.parametrize(
    ("points", "status", "why"),
    [
        (WHOLE[:-1], 0, "no point of [('stall', 'black_hole')]"),
        (["words", *WHOLE], 0, "not a point: 'words'"),
        ([{"what": "one_way", "bytes": 8}], 0, "not a point"),
        ([one_way(9)], 0, "without a meaning"),
        (WHOLE, 1, "ended with status 1"),
    ],
)
def test_a_run_that_measured_something_else_fails(
    tmp_path: Path, points: list[Any], status: int, why: str
) -> None:
    result = run(tmp_path, points, status=status)
    assert result.exit_code == 1
    assert why in result.stderr


def test_a_missing_program_is_named() -> None:
    result = CliRunner().invoke(command, ["--program", "/no/such/net_bench"])
    assert result.exit_code == 1
    assert "--program /no/such/net_bench: No such file" in result.stderr
    assert "make bench-netplugin" in result.stderr
