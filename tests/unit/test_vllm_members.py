"""A worker whose peer is gone between two calls; the exit status of the command line."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from r2serve.engines.children import EXIT_STATUS
from r2serve.engines.vllm import exit_status
from r2serve.engines.vllm.members import Members
from r2serve.errors import AbortedError, PeerClosedError, PeerLostError, R2cclError


class Engine:
    """An engine whose members are in a state."""

    def __init__(self) -> None:
        self.error: R2cclError | None = None

    def check_members(self) -> None:
        if self.error is not None:
            raise self.error


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def closed() -> list[str]:
    """A text for each report of a closed peer."""
    return []


@pytest.fixture
def members(engine: Engine, closed: list[str]) -> Members:
    return Members(lambda: [(Engine(), 10.0), (engine, 10.0)], lambda: closed.append("closed"))


def test_a_lost_peer_ends_the_worker_at_once(
    engine: Engine, members: Members, closed: list[str]
) -> None:
    assert members.look(100.0) is None
    engine.error = PeerLostError("no rail")
    assert members.look(100.5) is engine.error
    assert not closed


@pytest.mark.parametrize("kind", [PeerClosedError, AbortedError])
def test_an_end_in_good_order_has_time(
    engine: Engine, members: Members, closed: list[str], kind: type[R2cclError]
) -> None:
    """Both nodes of an engine stop one after the other, within the link timeout."""
    engine.error = kind("closed")
    assert members.look(100.0) is None
    assert closed == ["closed"]
    assert members.look(109.9) is None
    assert members.look(110.0) is engine.error
    assert closed == ["closed"], "once"


def test_the_time_starts_again_after_a_good_look(engine: Engine, members: Members) -> None:
    engine.error = PeerClosedError("closed")
    assert members.look(100.0) is None
    engine.error = None
    assert members.look(105.0) is None
    engine.error = PeerClosedError("closed")
    assert members.look(112.0) is None
    assert members.look(122.0) is engine.error


COMMAND_LINE = """
import logging, multiprocessing, os, signal, sys, time, weakref
from r2serve.engines import flag
from r2serve.engines.vllm import exit_status

def work(how):
    if how == "says":
        exit_status.report("PeerLostError: rank 1")
    elif how == "is stopped":
        os.kill(os.getpid(), signal.SIGTERM)
    elif how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    how, command_line = sys.argv[1], sys.argv[2] == "True"
    flag.of_command_line = command_line
    helper = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    helper.daemon = True
    helper.start()  # a helper that stays would keep the test's pipe open
    weakref.finalize(helper, print, "folders are removed")
    exit_status.hear_deaths()
    exit_status.listen_once()
    worker = multiprocessing.get_context("fork").Process(target=work, args=(how,), name="Worker-0")
    worker.start()
    worker.join()
    if how != "says":  # as vLLM's executor does
        exit_status.DEATHS.error(
            exit_status.DEATH + " (exit code: %s), shutting down executor.",
            worker.name,
            worker.exitcode,
        )
"""


@pytest.mark.parametrize(
    ("how", "command_line", "status", "text"),
    [
        ("ends", True, 0, ""),
        ("is stopped", True, 0, ""),  # a supervisor may signal every process of a unit
        ("says", True, EXIT_STATUS, "a worker failed: PeerLostError: rank 1"),
        ("is killed", True, EXIT_STATUS, "Worker-0 died unexpectedly (exit code: -9)"),
        ("says", False, 0, ""),  # a program around vllm.LLM decides itself
    ],
)
def test_a_failed_worker_shows_in_the_exit_status(
    how: str, command_line: bool, status: int, text: str
) -> None:
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path[:] = {sys.path!r}\n{COMMAND_LINE}",
            how,
            str(command_line),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == status, ran.stderr
    assert text in ran.stderr
    assert ran.stderr.count("exit status 70") == (1 if status else 0)
    assert ran.stdout == "folders are removed\n"


def test_a_report_without_a_first_process_has_no_effect(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(exit_status.VARIABLE, "r2serve-failures-none")
    with caplog.at_level(logging.DEBUG, logger=exit_status.__name__):
        exit_status.report("x" * 10_000)
    assert "does not hear" in caplog.text
    monkeypatch.delenv(exit_status.VARIABLE)
    exit_status.report("no process asks")
    assert os.environ.get(exit_status.VARIABLE) is None
