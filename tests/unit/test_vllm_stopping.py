"""A follower node that is told to stop while its leader serves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from timely import patience, timely

from r2serve.engines.children import EXIT_STATUS
from r2serve.engines.vllm import stopping

pytestmark = pytest.mark.slow

# Like vLLM's run_headless(): a daemon worker, an exit function that ends the worker, and a handler
# that leaves with SystemExit. The exit function registers itself after ours.
FOLLOWER = """
import logging, multiprocessing, multiprocessing.connection, os, signal, sys, time, weakref
from types import SimpleNamespace
from r2serve.engines import flag
from r2serve.engines.vllm import exit_status, stopping

class Executor:
    def __init__(self, how):
        self.end = weakref.finalize(self, self.shutdown)
        context = multiprocessing.get_context("fork")
        self.worker = context.Process(target=work, args=(how,), name="VllmWorker-1", daemon=True)
        self.worker.start()

    def shutdown(self):
        self.worker.terminate()
        self.worker.join()
        print(f"the worker ended with {self.worker.exitcode}", flush=True)

def tell(what):
    # One write a line: the two processes share the pipe.
    os.write(1, f"{what}\\n".encode())

def work(how):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    tell(os.getpid())
    signal.sigwait({signal.SIGUSR1})
    if how == "closed":
        exit_status.report_closed()
    elif how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)

def leave(number, frame):
    raise SystemExit

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    how, timeout_s, node = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    flag.of_command_line = True
    exit_status.listen_once()
    parallel = SimpleNamespace(node_rank_within_dp=node)
    config = SimpleNamespace(shutdown_timeout=timeout_s, parallel_config=parallel)
    stopping.keep_workers_once(config)
    stopping.keep_workers_once(config)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    signal.signal(signal.SIGTERM, leave)
    executor = Executor(how)
    tell("ready")
    multiprocessing.connection.wait([executor.worker.sentinel])
"""

Start = Callable[..., "Follower"]


class Follower:
    """The first process of a follower node, with a worker."""

    def __init__(self, log: Path, how: str, timeout_s: int, node: int = 1) -> None:
        self.log = log
        with log.open("wb") as written:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{FOLLOWER}"),
                    *(how, str(timeout_s), str(node)),
                ],
                stdout=subprocess.PIPE,
                stderr=written,
                text=True,
            )
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline().strip() for _ in range(2)]  # of both processes
        (self.worker,) = (int(line) for line in lines if line != "ready")

    def told_to_stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def ended(self) -> tuple[int, str, str]:
        """Waits for the end; returns exit status, output and log."""
        out, _ = self.process.communicate(timeout=60 * patience())
        return self.process.returncode, out, self.log.read_text()

    def stays(self) -> None:
        """Checks that process and worker live for a second after the process was told to stop."""
        timely(lambda: "told to stop:" in self.log.read_text(), "the wait for the leader")
        until = time.monotonic() + 1
        while time.monotonic() < until:
            assert self.process.poll() is None
            os.kill(self.worker, 0)
            time.sleep(0.05)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Follower] = []

    def make(how: str, timeout_s: int, node: int = 1) -> Follower:
        started.append(Follower(tmp_path / "log", how, timeout_s, node))
        return started[-1]

    yield make
    for each in started:
        each.process.kill()
        each.process.communicate()


@pytest.mark.case("28", "the follower ended its workers, and no stream finished")
def test_a_follower_keeps_its_workers_until_the_leader_has_ended(start: Start) -> None:
    follower = start("closed", 600)
    follower.told_to_stop()
    follower.stays()
    os.kill(follower.worker, signal.SIGUSR1)
    status, out, log = follower.ended()
    assert (status, out) == (0, f"the worker ended with {-signal.SIGTERM}\n"), log
    assert "serve until the leader node has ended, for at most 600 s" in log
    assert "the workers of this node end: the leader node has ended" in log


def test_the_time_ends_the_workers_of_a_leader_that_still_serves(start: Start) -> None:
    follower = start("serves", 1)
    began = time.monotonic()
    follower.told_to_stop()
    status, out, log = follower.ended()
    assert time.monotonic() - began >= 1
    assert (status, out) == (0, f"the worker ended with {-signal.SIGTERM}\n"), log
    assert "the leader node still serves after 1 s" in log


def test_a_second_signal_ends_the_wait(start: Start) -> None:
    follower = start("serves", 600)
    follower.told_to_stop()
    follower.stays()
    follower.told_to_stop()
    status, out, log = follower.ended()
    assert (status, out) == (0, f"the worker ended with {-signal.SIGTERM}\n"), log
    assert "told to stop again" in log


def test_a_worker_that_dies_meanwhile_shows_in_the_exit_status(start: Start) -> None:
    follower = start("dies", 600)
    follower.told_to_stop()
    follower.stays()
    os.kill(follower.worker, signal.SIGUSR1)
    status, _, log = follower.ended()
    assert status == EXIT_STATUS, log
    assert "a worker failed: VllmWorker-1 (exit code: -9) ended" in log


@pytest.mark.parametrize(
    ("timeout_s", "node"), [(0, 1), (600, 0)], ids=["no time to finish requests", "a leader"]
)
def test_other_nodes_end_as_without_r2serve(start: Start, timeout_s: int, node: int) -> None:
    follower = start("serves", timeout_s, node)
    follower.told_to_stop()
    status, out, log = follower.ended()
    assert (status, out) == (0, f"the worker ended with {-signal.SIGTERM}\n"), log
    assert "told to stop" not in log


def test_a_program_around_the_engine_decides_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first process of a command line waits."""
    registered: list[object] = []
    monkeypatch.setattr(stopping.atexit, "register", lambda *call: registered.append(call))
    monkeypatch.setattr(stopping.flag, "of_command_line", False)
    parallel = SimpleNamespace(node_rank_within_dp=1)
    stopping.keep_workers_once(SimpleNamespace(shutdown_timeout=5, parallel_config=parallel))
    assert not registered
