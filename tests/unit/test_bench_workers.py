"""Workers of the collectives benchmark: real processes of the peers that are always there."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from r2serve.bench.collectives.control import NotSupported, WorkerError, WorkerGroup
from r2serve.bench.collectives.matrix import Options, Setting, Workload
from r2serve.bench.collectives.native.build import BuildError, build
from r2serve.bench.collectives.peers import Launch, PeerUnavailable, Process, launch
from r2serve.bench.collectives.resilience import MIN_PAIRS, compare
from r2serve.bench.collectives.runner import run, started

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def request(op: str, size: int = 4096, dtype: str = "float32") -> str:
    return Workload(op, size, dtype).request("auto")


@needs_compiler
@pytest.mark.parametrize("size", [4, 1024, 32 * 1024, 32 * 1024 + 4, 3 << 20])
def test_the_floor_exchanges_and_adds(tmp_path: Path, size: int) -> None:
    with started("floor", Setting(2, 2), tmp_path) as group:
        group.prepare(request("all_reduce", size))
        times = group.run(1, 7)
    assert [len(of_rank) for of_rank in times] == [7, 7]
    assert all(time > 0 for of_rank in times for time in of_rank)


@needs_compiler
def test_what_the_floor_cannot_do_is_said_and_it_lives_on(tmp_path: Path) -> None:
    with started("floor", Setting(2, 1), tmp_path) as group:
        with pytest.raises(NotSupported, match="all_reduce only"):
            group.prepare(request("broadcast"))
        with pytest.raises(NotSupported, match="bfloat16"):
            group.prepare(request("all_reduce", dtype="bfloat16"))
        group.prepare(request("all_reduce", dtype="int32"))
        assert len(group.run(0, 1)[0]) == 1


def test_the_floor_is_for_two_ranks(tmp_path: Path) -> None:
    with pytest.raises(PeerUnavailable, match="two ranks"):
        launch("floor", Setting(3, 2), tmp_path / "control", tmp_path)


def test_gloo_does_every_op_and_its_results_are_checked(tmp_path: Path) -> None:
    with started("gloo", Setting(2, 2), tmp_path) as group:
        for op in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
            group.prepare(request(op))
            assert len(group.run(1, 3)[1]) == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_r2ccl_does_every_op_and_algorithm(tmp_path: Path, dtype: str) -> None:
    with started("r2ccl", Setting(2, 2), tmp_path) as group:
        for op in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
            group.prepare(request(op, 1 << 20, dtype))
            assert len(group.run(1, 3)[1]) == 3
        for algorithm in ("one_shot", "two_shot"):
            group.prepare(Workload("all_reduce", 4096, dtype).request(algorithm))
            assert len(group.run(1, 3)[0]) == 3
        with pytest.raises(NotSupported, match="one algorithm"):
            group.prepare(Workload("broadcast", 4096, dtype).request("two_shot"))
        names = [
            [rail.partition(",")[0] for rail in rails] for rails in group.ask("rails", "rails")
        ]
    assert names == [["rail0@node0", "rail1@node0"], ["rail0@node1", "rail1@node1"]]


def test_resilience_is_compared_in_pairs() -> None:
    options = Options(sizes=(1024,), iterations=10, rounds=2)
    (pairs,) = compare(options, Setting(2, 2), lambda line: None)
    assert pairs.pairs == MIN_PAIRS
    assert pairs.on_p50_us > 0
    assert pairs.ratio_low <= pairs.ratio <= pairs.ratio_high


def test_a_soak_ends_on_all_ranks_after_the_same_collective(tmp_path: Path) -> None:
    with started("gloo", Setting(2, 2), tmp_path) as group:
        group.prepare(request("all_reduce"))
        for _ in range(2):  # the flag that ended the first one is taken back
            before = time.monotonic_ns()
            rank0, rank1 = group.ask("soak 50", "soak")
            after = time.monotonic_ns()
            assert len(rank0) == len(rank1) > 2
            for start, *times in (rank0, rank1):
                assert before <= int(start)
                assert int(start) + sum(map(int, times)) <= after
            assert sum(map(int, rank0[1:])) >= 50e6
        assert group.ask("rails", "rails") == [[], []]


@needs_compiler
def test_all_contenders_become_rows_and_the_rest_is_listed() -> None:
    options = Options(sizes=(1024,), ranks=(2, 3), impls=("gloo", "floor"), iterations=10, rounds=2)
    lines: list[str] = []
    results = run(options, lines.append)
    assert [(row.impl, row.ranks, row.samples) for row in results.rows] == [
        ("gloo", 2, 10),
        ("floor", 2, 10),
        ("gloo", 3, 10),
    ]
    assert [skipped.what for skipped in results.skipped] == ["floor (3 ranks, 2 rails)"]
    assert any("all_reduce" in line for line in lines)


def test_a_worker_that_ends_while_starting_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "import sys; sys.exit('no such rail')"]
    with pytest.raises(WorkerError, match="no such rail"):
        WorkerGroup("peer", Launch([Process(words)]), 1, tmp_path / "control", tmp_path / "log")


def test_a_worker_that_dies_later_is_an_error_and_leaves_no_process(tmp_path: Path) -> None:
    script = (
        "import os, socket, sys; print(os.getpid(), flush=True);"
        "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
        "s.send(b'hello 0\\n'); s.recv(100); os.abort()"
    )
    control, log = tmp_path / "control", tmp_path / "log"
    plan = Launch([Process([sys.executable, "-c", script, str(control)])])
    with WorkerGroup("peer", plan, 1, control, log) as group:
        pid = int(log.read_text())
        with pytest.raises(WorkerError, match="closed its control connection"):
            group.run(0, 1)
    assert not Path(f"/proc/{pid}").exists()
    assert not control.exists()


def test_a_native_peer_without_a_compiler_is_refused() -> None:
    with pytest.raises(BuildError, match="no compiler"):
        build("floor.cc", None)


@needs_compiler
def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho unknown target >&2\nexit 1\n")
    compiler.chmod(0o755)
    with pytest.raises(BuildError, match="unknown target"):
        build("floor.cc", str(compiler))


@needs_compiler
def test_a_native_peer_is_compiled_once() -> None:
    first = build("floor.cc", shutil.which("c++"))
    before = first.stat().st_mtime_ns
    assert build("floor.cc", shutil.which("c++")) == first
    assert first.stat().st_mtime_ns == before
    assert os.access(first, os.X_OK)
