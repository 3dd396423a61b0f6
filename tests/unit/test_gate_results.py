"""Skips, kills for want of memory, sanitizer reports and the record of a run of `make test`."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import gate
import gate_stages
import hangs
import outcomes
import pytest
import skips
import strain
from outcomes import Outcome
from skips import Expected, Skip
from timely import PATIENCE_VARIABLE

TESTS = Path(__file__).resolve().parents[1]
ROOTLESS = Skip("engines", "tests/e2e/test_lab.py::test_a[root]", "needs root")


def test_a_skip_is_expected_in_its_surroundings_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(skips.SURROUNDINGS, "on Mars", lambda: True)
    monkeypatch.setitem(skips.SURROUNDINGS, "on Venus", lambda: False)
    for entry, fits in (
        (Expected("needs root"), True),
        (Expected("needs*", surroundings="on Mars"), True),
        (Expected("needs*", surroundings="on Venus"), False),
        (Expected("needs root", tests="*[[]root]"), True),
        (Expected("needs root", tests="tests/unit/*"), False),
        (Expected("needs root", stages=("unit", "engines")), True),
        (Expected("needs root", stages=("tsan",)), False),
        (Expected("needs"), False),
    ):
        assert skips.unexpected([ROOTLESS], [entry]) == ([] if fits else [ROOTLESS]), entry
    skips.holds.cache_clear()


def test_each_expected_skip_is_one_of_a_test() -> None:
    sources = [*TESTS.rglob("*.py"), *TESTS.rglob("*.cc")]
    text = "\n".join(path.read_text(errors="replace") for path in sources)
    entries = skips.expected()
    assert entries
    for entry in entries:
        begin = entry.reason.partition("*")[0]
        assert f'"{begin}' in text, f"no test skips with {entry.reason!r}"


def test_a_list_with_unknown_surroundings_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "skips.toml"
    file.write_text('[[skip]]\nreason = "needs root"\nsurroundings = "on Mars"\n')
    with pytest.raises(ValueError, match="unknown surroundings: on Mars"):
        skips.expected(file)


def test_every_surrounding_can_be_measured() -> None:
    for name in skips.SURROUNDINGS:
        assert skips.holds(name) in (True, False), name


@pytest.mark.parametrize("group", [True, False], ids=["control group", "whole machine"])
def test_kills_are_counted(tmp_path: Path, group: bool) -> None:
    machine = tmp_path / "vmstat"
    machine.write_text("nr_free_pages 7\noom_kill 5\n")
    root = tmp_path / "cgroup"
    if group:
        root.mkdir()
        (root / "memory.events").write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert strain.memory_kills(root, machine) == (2 if group else 5)
    machine.unlink()
    assert strain.memory_kills(root, machine) == (2 if group else 0)


def test_a_kill_belongs_to_the_tests_at_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = 4  # kills before the run do not count
    monkeypatch.setattr(strain, "memory_kills", lambda: counter)
    monitor = strain.Monitor()
    began = time.time()
    assert monitor.kills(0.0, began) == 0
    between = time.time()
    counter = 6
    assert monitor.kills(0.0, time.time()) == 2
    assert monitor.kills(between, between) == 2
    assert monitor.kills(0.0, began - 1) == 0
    after = time.time()
    assert monitor.kills(after + 1, after + 2) == 0


def results_of_pytest(folder: Path) -> Path:
    file = folder / "unit.json"
    failed = [
        {"nodeid": "a::before", "message": "call: wrong bit", "started": 1.0, "stopped": 2.0},
        {"nodeid": "a::killed", "message": "call: rank 1 ended", "started": 3.0, "stopped": 4.0},
        {"nodeid": "worker gw0", "message": "crashed", "started": None, "stopped": None},
    ]
    row = {"passed": 2, "skipped": [["a::b", "needs root"]], "failed": failed, "late": []}
    file.write_text(json.dumps(row))
    return file


def test_a_failure_during_a_kill_is_undetermined(tmp_path: Path) -> None:
    outcome = Outcome("unit", lambda since, until: int(since <= 3.5 <= until), began=0.0)
    outcomes.add_pytest(results_of_pytest(tmp_path), outcomes.TESTS_FAILED, outcome)
    assert outcome.failures == ["a::before: call: wrong bit"]
    assert outcome.undetermined == ["a::killed: call: rank 1 ended", "worker gw0: crashed"]
    assert outcome.skipped == [Skip("unit", "a::b", "needs root")]
    assert outcomes.status_of([outcome]) == 1
    outcome.failures.clear()
    assert outcomes.status_of([outcome]) == 3
    assert outcomes.status_of([Outcome("lint")]) == 0


LOG = """Start testing: Nov 29 13:05 UTC
----------------------------------------------------------
1/2 Testing: link_test_0
1/2 Test: link_test_0
Output:
1 is not 2
----------------------------------------------------------
2/2 Testing: rail_test_0
2/2 Test: rail_test_0
Output:
[ RUN      ] Rail.Moves
WARNING: ThreadSanitizer: data race (pid=7)
  Write of size 8 at 0x7b04 by thread T1:
    #0 Rail::move() rail.cc:7
SUMMARY: ThreadSanitizer: data race rail.cc:7 in Rail::move()
[       OK ] Rail.Moves
"""


def test_a_sanitizers_report_is_found_in_the_log_of_its_program(tmp_path: Path) -> None:
    log = tmp_path / "LastTest.log"
    log.write_text(LOG)
    assert outcomes.sanitizer_reports(log) == {"rail_test_0": LOG.splitlines()[11:15]}
    undefined = LOG.replace("1 is not 2", "link.cc:3:7: runtime error: signed integer overflow")
    log.write_text(undefined)
    reports = outcomes.sanitizer_reports(log)
    assert list(reports) == ["link_test_0", "rail_test_0"]
    assert len(reports["link_test_0"]) == 2


def test_a_sanitizers_report_of_an_earlier_run_does_not_count(tmp_path: Path) -> None:
    log = tmp_path / "Testing" / "Temporary" / "LastTest.log"
    log.parent.mkdir(parents=True)
    log.write_text(LOG)
    for began, failures in ((log.stat().st_mtime - 1, 1), (log.stat().st_mtime + 1, 0)):
        outcome = Outcome("asan", began=began)
        outcomes.add_native(tmp_path, tmp_path, 0, outcome)
        assert len(outcome.failures) == failures
        assert outcomes.status_of([outcome]) == failures


def test_a_record_gets_its_folder_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "results" / "of-today" / "gate.jsonl"
    monkeypatch.setenv(gate.RECORD_VARIABLE, str(file))
    record = gate.options_of([], None).record
    assert record == file
    file.unlink()
    file.parent.rmdir()  # a run begins with the removal of the results before
    for commit in ("a", "b"):
        gate.keep({"commit": commit}, tmp_path / "gate.json", record)
    assert [json.loads(line)["commit"] for line in file.read_text().splitlines()] == ["a", "b"]


def test_closing_lists_of_parts_outlast_the_next_part(tmp_path: Path) -> None:
    results = tmp_path / "results"
    for part in ("hour", "stalls"):
        gate.renew(results)
        assert not (results / "gate.json").exists()
        gate.keep({"part": part}, results / "gate.json", results / gate.PARTS)
    lines = (results / gate.PARTS).read_text().splitlines()
    assert [json.loads(line)["part"] for line in lines] == ["hour", "stalls"]


def test_a_record_without_a_place_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(gate.RECORD_VARIABLE, str(tmp_path / "file" / "gate.jsonl"))
    with pytest.raises(SystemExit) as ended:
        gate.options_of([], None)
    assert ended.value.code == 2
    assert f"({gate.RECORD_VARIABLE}) is {tmp_path / 'file' / 'gate.jsonl'}: " in (
        capsys.readouterr().err
    )


def test_ctests_limits_are_longer_than_the_limits_of_the_gate() -> None:
    """CTest kills a program without its stacks, so that the gate comes first."""
    text = (TESTS.parent / "CMakeLists.txt").read_text()
    limits = [float(each) for each in re.findall(r"set\(limit (\d+)\)", text)]
    gates = (gate_stages.HANG_S, gate_stages.LONG_HANG_S)
    for limit_s, hang_s in zip(limits, gates, strict=True):
        assert limit_s >= hang_s + 2 * hangs.LONGEST_DUMP_S


def test_a_busy_machine_has_more_time_for_all_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PATIENCE_VARIABLE, "2.50")
    watchdog = hangs.Watchdog(tmp_path, tmp_path)
    of_all = gate.Gate([], 1000.0, watchdog, strain.Monitor(), tmp_path)
    assert 1000.0 < of_all.left_s() <= 2500.0


def test_programs_with_the_label_timing_are_found_by_any_number(tmp_path: Path) -> None:
    lines = [f'add_test(rail{number}_test_0 "/bin/true")' for number in range(12)]
    for number, labels in ((0, "timing"), (1, "slow"), (10, "slow;timing")):
        lines.append(f'set_tests_properties(rail{number}_test_0 PROPERTIES LABELS "{labels}")')
    (tmp_path / "CTestTestfile.cmake").write_text("\n".join(lines) + "\n")
    assert outcomes.timing_programs(tmp_path) == {"rail0_test_0", "rail10_test_0"}
