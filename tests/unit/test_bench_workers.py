"""Workers of the collectives benchmark: real processes of the contenders always available."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from timely import timely

from r2serve.bench.collectives import contenders, runner
from r2serve.bench.collectives.contenders import ContenderUnavailable, Launch, WorkerCommand, launch
from r2serve.bench.collectives.control import (
    NotSupported,
    Timed,
    WorkerError,
    WorkerGroup,
    WrongResult,
)
from r2serve.bench.collectives.matrix import (
    ALGORITHMS,
    OPS,
    CollectiveCall,
    Contender,
    MatrixOptions,
    Setting,
)
from r2serve.bench.collectives.native.build import FLAGS, SOURCES, BuildError, build
from r2serve.bench.collectives.native.mpich import MPICH_VARIABLE, mpich_version
from r2serve.bench.collectives.resilience import MIN_PAIRS, compare
from r2serve.bench.collectives.runner import Refusal, list_refusals, run, started
from r2serve.bench.collectives.strikes import rails_of, sent, soak
from r2serve.bench.collectives.worker import RankWorker

pytestmark = pytest.mark.slow
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def shared_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles each native contender once a run, for the workers of pytest together."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "bench-cache"))


@pytest.fixture
def own_cache(tmp_path: Path, shared_cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def request(op: str, size: int = 4096, dtype: str = "float32") -> str:
    return CollectiveCall(op, size, dtype).request("auto")


@needs_compiler
@pytest.mark.parametrize("size", [4, 1024, 32 * 1024, 32 * 1024 + 4, 3 << 20])
def test_the_floor_exchanges_and_adds(tmp_path: Path, size: int) -> None:
    with started("floor", Setting(2, 2), tmp_path) as group:
        group.prepare(request("all_reduce", size))
        taken = group.run(1, 7)
    assert [len(of_rank) for of_rank in taken.times_ns] == [7, 7]
    assert all(time > 0 for of_rank in taken.times_ns for time in of_rank)
    assert len(taken.cpu_ns) == 2
    assert all(spent > 0 for spent in taken.cpu_ns)


@needs_compiler
def test_the_floor_refuses_unsupported_requests_and_stays_usable(tmp_path: Path) -> None:
    with started("floor", Setting(2, 1), tmp_path) as group:
        with pytest.raises(NotSupported, match="all_reduce only"):
            group.prepare(request("broadcast"))
        with pytest.raises(NotSupported, match="bfloat16"):
            group.prepare(request("all_reduce", dtype="bfloat16"))
        group.prepare(request("all_reduce", dtype="int32"))
        assert len(group.run(0, 1).times_ns[0]) == 1


def test_the_floor_is_for_two_ranks(tmp_path: Path) -> None:
    with pytest.raises(ContenderUnavailable, match="two ranks"):
        launch("floor", Setting(3, 2), tmp_path / "control", tmp_path)


def all_ops(group: WorkerGroup, ranks: int, dtype: str) -> list[str]:
    """Runs every op of the workers, which check the results; returns the supported ops."""
    done = []
    refused = []
    options = MatrixOptions(ops=OPS, sizes=(4096,), dtypes=(dtype,), ranks=(ranks,))
    for workload in options.workloads(ranks):
        try:
            group.prepare(workload.request("auto"))
        except NotSupported as error:
            refused.append((workload.op, str(error)))
            continue
        taken = group.run(1, 3)
        assert [len(of_rank) for of_rank in taken.times_ns] == [3] * ranks
        assert min(taken.cpu_ns) > 0
        done.append(workload.op)
    assert all(f"no {op}" in reason for op, reason in refused)
    return done


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_gloo_does_every_even_op_and_its_results_are_checked(tmp_path: Path, ranks: int) -> None:
    with started("gloo", Setting(ranks, 2), tmp_path) as group:
        done = all_ops(group, ranks, "float32")
    assert set(OPS) - set(done) == {"all_gatherv", "reduce_scatterv"}


@needs_compiler
@pytest.mark.parametrize(
    ("impl", "ranks"),
    [("openmpi", 2), ("mpich", 2), pytest.param("mpich", 3, marks=pytest.mark.long)],
)
def test_mpi_does_every_op(tmp_path: Path, impl: str, ranks: int) -> None:
    loopback = Path("/sys/class/net/lo/statistics/tx_bytes")
    try:
        with started(impl, Setting(ranks, 2), tmp_path) as group:
            for dtype in ("float32", "int64"):
                assert all_ops(group, ranks, dtype) == list(OPS)
            before = int(loopback.read_text())
            group.prepare(request("all_reduce", 1 << 20))
            group.run(0, 10)
            # over TCP, not through shared memory
            assert int(loopback.read_text()) - before > 10 << 20
            with pytest.raises(NotSupported, match="bfloat16"):
                group.prepare(request("all_reduce", dtype="bfloat16"))
    except ContenderUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [
        (3, "bfloat16"),
        pytest.param(2, "float32", marks=pytest.mark.long),
        pytest.param(2, "int64", marks=pytest.mark.long),
    ],
)
def test_r2ccl_does_every_op(tmp_path: Path, ranks: int, dtype: str) -> None:
    with started("r2ccl", Setting(ranks, 2), tmp_path) as group:
        assert all_ops(group, ranks, dtype) == list(OPS)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.long)])
def test_r2ccl_does_every_algorithm(tmp_path: Path, dtype: str) -> None:
    with started("r2ccl", Setting(2, 2), tmp_path) as group:
        for algorithm in ALGORITHMS:
            group.prepare(CollectiveCall("all_reduce", 4096, dtype).request(algorithm))
            assert len(group.run(1, 3).times_ns[0]) == 3
        with pytest.raises(NotSupported, match="one algorithm"):
            group.prepare(CollectiveCall("broadcast", 4096, dtype).request("two_shot"))
        names = [
            [rail.partition(",")[0] for rail in rails] for rails in group.ask("rails", "rails")
        ]
    assert names == [["rail0@node0", "rail1@node0"], ["rail0@node1", "rail1@node1"]]


def rail_states(group: WorkerGroup, rank: int) -> list[bool]:
    """Returns for each rail of a rank whether the rail is in use.

    A machine short of CPU suspects rails in use.
    """
    return [state in ("UP", "SUSPECT") for _, state, _ in rails_of(group)[rank]]


@pytest.mark.parametrize(
    ("state", "rails", "up"),
    [
        ("one-lost", 2, [False, True]),
        ("two-lost", 3, [False, False, True]),
        # A loaded machine makes the other rail just as slow.
        pytest.param("slow", 2, [True] * 2, marks=pytest.mark.alone),
    ],
)
def test_r2ccl_is_measured_with_rails_lost_or_slow(
    tmp_path: Path, state: str, rails: int, up: list[bool]
) -> None:
    with started("r2ccl", Setting(2, rails, state), tmp_path) as group:
        group.prepare(request("all_reduce", 4 << 20))
        for _ in range(10):
            before = sent(group, 0)
            group.run(1, 3)
            assert rail_states(group, 0) == up
            carried = {rail: now - before[rail] for rail, now in sent(group, 0).items()}
            if state != "slow" or 0 < carried[0] < carried[1] / 2:
                break
            # r2ccl slowly forgets a rate that was measured while the machine was busy.
            soak(group, 1000)
    if state == "slow":
        timely(
            lambda: 0 < carried[0] < carried[1] / 2,
            f"share of the slow rail: {carried}",
            within_s=0,
        )
    else:
        assert all((carried[rail] > 0) is is_up for rail, is_up in enumerate(up))


@needs_compiler
def test_the_floor_uses_the_remaining_rails(tmp_path: Path) -> None:
    left = launch("floor", Setting(2, 3, "two-lost"), tmp_path / "control", tmp_path)
    *_, only = left.processes[0].command
    assert only.startswith("127.0.0.3:")
    assert len(left.processes[0].command) == 4


def test_an_impossible_setting_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ContenderUnavailable, match="at least 3 rails"):
        launch("r2ccl", Setting(2, 2, "two-lost"), tmp_path / "control", tmp_path)
    with pytest.raises(ContenderUnavailable, match="only r2ccl"):
        launch("gloo", Setting(2, 2, "slow"), tmp_path / "control", tmp_path)


def test_mpich_is_searched_separately_from_open_mpi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MPICH_VARIABLE, str(tmp_path / "mpich"))
    with pytest.raises(ContenderUnavailable, match="pip install --prefix"):
        launch("mpich", Setting(2, 2), tmp_path / "control", tmp_path)
    assert mpich_version() is None
    program = tmp_path / "mpich" / "bin" / "mpiexec"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho 'HYDRA build details:'\necho '   Version:   5.0.2'\n")
    program.chmod(0o755)
    assert mpich_version() == "5.0.2"


def test_a_free_port_is_outside_the_ephemeral_range() -> None:
    first, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    with socket.socket() as taken:
        port = contenders.free_port("127.0.0.1")
        taken.bind(("127.0.0.1", port))
        others = {contenders.free_port("127.0.0.1") for _ in range(50)}
    assert port not in others
    assert max(others) < int(first)


def test_resilience_is_compared_in_pairs() -> None:
    options = MatrixOptions(sizes=(1024,), iterations=10, rounds=2)
    (pairs,) = compare(options, Setting(2, 2), lambda line: None)
    assert pairs.pairs == MIN_PAIRS
    assert pairs.on_p50_us > 0
    assert pairs.ratio_low <= pairs.ratio <= pairs.ratio_high


def test_a_soak_ends_on_all_ranks_after_the_same_collective(tmp_path: Path) -> None:
    with started("gloo", Setting(2, 2), tmp_path) as group:
        group.prepare(request("all_reduce"))
        for _ in range(2):  # the flag that ended the first soak is reset
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
    options = MatrixOptions(
        sizes=(1024,), ranks=(2, 3), impls=("gloo", "floor"), iterations=10, rounds=2
    )
    lines: list[str] = []
    results = run(options, lines.append)
    assert [(row.impl, row.ranks, row.samples) for row in results.rows] == [
        ("gloo", 2, 10),
        ("floor", 2, 10),
        ("gloo", 3, 10),
    ]
    assert all(row.cpu_ns_per_byte and row.cpu_ns_per_byte > 0 for row in results.rows)
    assert [skipped.what for skipped in results.skipped] == ["floor (3 ranks, 2 rails)"]
    assert any("all_reduce" in line for line in lines)


def test_a_peer_that_dies_is_listed_and_the_rest_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = WorkerGroup.run
    calls = 0

    def run_once(self: WorkerGroup, warmup: int, iterations: int) -> Timed:
        nonlocal calls
        calls += self.name == "floor"
        if self.name == "floor" and calls > 1:
            raise WorkerError("floor worker closed its control connection")
        return real(self, warmup, iterations)

    monkeypatch.setattr(WorkerGroup, "run", run_once)
    options = MatrixOptions(sizes=(1024, 4096), impls=("gloo", "floor"), iterations=4, rounds=2)
    results = run(options, lambda line: None)
    assert [(row.impl, row.bytes) for row in results.rows] == [("gloo", 1024), ("gloo", 4096)]
    (skipped,) = results.skipped
    assert skipped.what == "floor all_reduce float32 1 KiB (2 ranks, 2 rails)"
    assert skipped.reason.startswith("and all later points: floor worker closed")


def test_refusals_at_several_sizes_are_one_line() -> None:
    gather = [CollectiveCall("gather", size, "float32") for size in (1024, 4096)]
    refusals = [Refusal(Contender("floor"), workload, "all_reduce only") for workload in gather]
    (skipped,) = list_refusals(refusals, Setting(2, 3, "one-lost"))
    assert skipped.what == "floor gather float32 1 KiB, 4 KiB (2 ranks, 3 rails, one-lost)"


def test_a_worker_that_ends_while_starting_is_an_error_with_its_output(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "import sys; sys.exit('no such rail')"]
    with pytest.raises(WorkerError, match="no such rail"):
        WorkerGroup(
            "peer", Launch([WorkerCommand(words)]), 1, tmp_path / "control", tmp_path / "log"
        )


def test_a_worker_that_dies_later_is_an_error_and_leaves_no_process(tmp_path: Path) -> None:
    script = (
        "import os, socket, sys; print(os.getpid(), flush=True);"
        "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
        "s.send(b'hello 0\\n'); s.recv(100); os.abort()"
    )
    control, log = tmp_path / "control", tmp_path / "log"
    plan = Launch([WorkerCommand([sys.executable, "-c", script, str(control)])])
    with WorkerGroup("peer", plan, 1, control, log) as group:
        pid = int(log.read_text())
        with pytest.raises(WorkerError, match="closed its control connection"):
            group.run(0, 1)
    assert not Path(f"/proc/{pid}").exists()
    assert not control.exists()


def answering(tmp_path: Path, *answers: str) -> WorkerGroup:
    """Starts workers, each with a fixed answer to any request."""
    script = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
        "s.send(f'hello {sys.argv[2]}\\n'.encode());"
        "[s.send(f'{sys.argv[3]}\\n'.encode()) for _ in iter(lambda: s.recv(100), b'quit\\n')]"
    )
    control, log = tmp_path / "control", tmp_path / "log"
    words = [sys.executable, "-c", script, str(control)]
    plan = Launch([WorkerCommand([*words, str(rank), said]) for rank, said in enumerate(answers)])
    return WorkerGroup("peer", plan, len(answers), control, log)


def test_a_wrong_result_takes_precedence_over_an_unsupported_op(tmp_path: Path) -> None:
    with (
        answering(tmp_path, "error no such op", "wrong result of gather") as group,
        pytest.raises(WrongResult, match="rank 1: wrong result of gather"),
    ):
        group.prepare(request("gather"))


def measure_wrong(tmp_path: Path, impl: str) -> list[Refusal]:
    """Returns the refusals of a matrix if rank 1 of `impl` gets a wrong result."""
    refusals: list[Refusal] = []
    workload = CollectiveCall("all_reduce", 4096, "float32")
    options = MatrixOptions(ops=("all_reduce",), sizes=(4096,), ranks=(2,))
    with answering(tmp_path, "ok", "wrong result: 1 of 1024") as group:
        contenders = [Contender(impl, "auto")]
        assert not runner._measure_point(options, workload, contenders, {impl: group}, refusals)
    return refusals


def test_a_wrong_result_of_r2ccl_ends_the_benchmark(tmp_path: Path) -> None:
    with pytest.raises(WrongResult, match="1 of 1024"):
        measure_wrong(tmp_path, "r2ccl")


def test_a_wrong_result_of_another_is_listed(tmp_path: Path) -> None:
    (refusal,) = measure_wrong(tmp_path, "gloo")
    assert "wrong result: 1 of 1024" in refusal.reason


class Forgetful:
    """A contender that never receives the input of other ranks."""

    def bind(
        self, op: str, algorithm: str, data: torch.Tensor, output: torch.Tensor
    ) -> Callable[[], object]:
        del op, algorithm, data, output
        return lambda: None


def test_a_python_worker_reports_a_wrong_result() -> None:
    peer: Any = Forgetful()
    said = RankWorker(peer, 0, 2).answer("prepare all_reduce float32 4096 auto")
    assert said == "wrong result: 1024 of 1024 elements, from 0 to 1023; the first is 1.0, not 3.0"


def test_a_pinned_rank_computes_before_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a call includes the computation, so that the times of a soak are consecutive."""
    monkeypatch.setenv(contenders.COMPUTE, "1500")
    peer: Any = Forgetful()
    worker = RankWorker(peer, 0, 2)
    worker._once = calls = Calls()
    worker._data = torch.zeros(4)
    said = worker.answer("soak 5").split()
    assert said[0] == "soak"
    assert len(said[2:]) == calls.made
    assert all(int(time) >= 1_500_000 for time in said[2:])
    monkeypatch.delenv(contenders.COMPUTE)
    assert RankWorker(peer, 0, 2)._compute_ns == 0


class Calls:
    """Counts the calls of a collective."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self) -> None:
        self.made += 1


WRONG_SUM = """
#include "worker.hpp"
struct Wrong : r2serve::bench::Collective {
  std::string prepare(const r2serve::bench::Request&) override {
    throw r2serve::bench::WrongResult("sum");
  }
  void once() override {}
};
int main(int, char** argv) {
  r2serve::bench::Control control(argv[1], 0);
  Wrong wrong;
  return r2serve::bench::serve(control, wrong, 0);
}
"""


@needs_compiler
def test_a_native_worker_reports_a_wrong_result(tmp_path: Path) -> None:
    (tmp_path / "wrong.cc").write_text(WRONG_SUM)
    program, control = tmp_path / "wrong", tmp_path / "control"
    build_it = ["c++", *FLAGS, "-I", str(SOURCES), str(tmp_path / "wrong.cc"), "-o", str(program)]
    subprocess.run(build_it, check=True)
    plan = Launch([WorkerCommand([str(program), str(control)])])
    with (
        WorkerGroup("peer", plan, 1, control, tmp_path / "log") as group,
        pytest.raises(WrongResult, match="rank 0: wrong sum"),
    ):
        group.prepare(request("all_reduce"))


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
@pytest.mark.usefixtures("own_cache")
def test_a_native_peer_is_compiled_once() -> None:
    first = build("floor.cc", shutil.which("c++"))
    before = first.stat().st_mtime_ns
    assert build("floor.cc", shutil.which("c++")) == first
    assert first.stat().st_mtime_ns == before
    assert os.access(first, os.X_OK)
