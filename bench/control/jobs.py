"""Jobs of two nodes in a lab, behind relays or direct; and relays without a job."""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from r2serve.lab.lab import Lab
from r2serve.lab.rails import wait_until
from r2serve.lab.serving.journals import Journals

PORT = 29500
TALK = Path(__file__).with_name("talk.py")
START_S = 180.0
"""Longest wait for the start of a job, and for an answer."""
LOOK_S = 0.05
REAL_TIME = ["chrt", "--rr", "5"]
"""Begin of a command with real-time priority, above all other load."""
TYPED = "PeerLostError"


class ControlError(RuntimeError):
    """A job did not start, ended too early, or did not answer; the text has the end of its log."""


def check_requirements() -> None:
    """Raises ControlError without pyzmq, which comes with vLLM."""
    if importlib.util.find_spec("zmq") is None:
        raise ControlError("the module zmq is not installed (package pyzmq): it comes with vLLM")


class Program:
    """A process of a node; lines of JSON come from its standard output."""

    def __init__(
        self, lab: Lab, node: int, argv: Sequence[str], env: Mapping[str, str], work: Path
    ) -> None:
        self._log = work / f"node{node}.log"
        with self._log.open("ab") as log:
            self.process = lab.nodes[node].popen(
                argv,
                env=env,
                cwd=work,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            # Libraries print, too, and a killed process may leave half a line.
            if line.startswith(b"{") and line.endswith(b"}\n"):
                self._lines.put(json.loads(line))

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def hear(self, key: str, within_s: float = START_S) -> dict[str, Any]:
        """Waits for a line with ``key``. Raises ControlError after ``within_s`` s."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            try:
                line = self._lines.get(timeout=LOOK_S)
            except queue.Empty:
                if self.process.poll() is not None and not self._reader.is_alive():
                    break
                continue
            if key in line:
                return line
        raise ControlError(self._failed(f"no line with {key!r} within {within_s:g} s"))

    def say(self, text: str) -> None:
        """Sends an order. Raises ControlError if the process has ended."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(text.encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise ControlError(self._failed(f"{text!r} is read by no process")) from error

    def _failed(self, what: str) -> str:
        status = self.process.poll()
        return f"{what} (exit status {status}): {self.log.strip()[-600:]}"

    def ended_within(self, seconds: float) -> int:
        """Returns the exit status. Raises ControlError if the process goes on."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise ControlError(f"a program still runs after {seconds:g} s") from error

    def close(self) -> None:
        """Closes the pipes; the process must have ended."""
        self._reader.join()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):  # an order was not read any more
            self.process.stdin.close()
        self.process.stdout.close()


class Job:
    """Programs of both nodes; a context manager that ends all processes of the nodes.

    relays: whether ``r2serve relay -- COMMAND`` carries the connections. command: of each rank;
    empty: relays alone, as an engine starts them. settings: further environment variables.
    real_time: whether the processes have real-time priority.
    """

    def __init__(
        self,
        lab: Lab,
        work: Path,
        command: Sequence[str],
        *,
        relays: bool = True,
        settings: Mapping[str, str] | None = None,
        real_time: bool = False,
    ) -> None:
        self._lab = lab
        self._work = work
        self._command = list(command)
        self._relays = relays
        self._settings = dict(settings or {})
        self._first = REAL_TIME if real_time else []
        self.programs: list[Program] = []

    def __enter__(self) -> Job:
        self._work.mkdir(parents=True, exist_ok=True)
        try:
            for node in (0, 1):
                argv = [*self._first, *self._argv(node)]
                env = self._environment(node)
                self.programs.append(Program(self._lab, node, argv, env, self._work))
            for program in self.programs:
                program.hear("ready" if self._command else "prefix")
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._kill()

    def _kill(self) -> None:
        for node in self._lab.nodes:
            node.kill_all()
        for program in self.programs:
            program.close()

    def _argv(self, node: int) -> list[str]:
        if not self._relays:
            return self._command
        place = ["--node", str(node), "--nodes", "2"]
        meeting = ["--master", self._lab.nodes[0].management_address, "--port", str(PORT)]
        program = [sys.executable, "-c", "from r2serve.cli import main; main()", "relay"]
        words = ["--", "env", "R2SERVE_TALK_ADDRESS={master}", *self._command]
        return [*program, *place, *meeting, *(words if self._command else [])]

    def _environment(self, node: int) -> dict[str, str]:
        first = self._lab.nodes[0]
        rails = [first.rail_address(rail) for rail in range(self._lab.rails)]
        journal = self.journal_folder(node)
        journal.mkdir(parents=True, exist_ok=True)
        env = {
            **os.environ,
            "R2CCL_CONTROL_MASTER": ",".join([first.management_address, *rails]),
            "R2CCL_JOURNAL_DIR": str(journal),
            "R2CCL_MANAGEMENT": "mgmt0",
            "RANK": str(node),
            "WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
            **self._settings,
        }
        if not self._relays:
            env |= {
                "MASTER_ADDR": first.management_address,
                "MASTER_PORT": str(PORT),
                "GLOO_SOCKET_IFNAME": "mgmt0",
                "R2SERVE_TALK_ADDRESS": first.management_address,
            }
        return env

    def journal_folder(self, node: int) -> Path:
        return self._work / f"node{node}" / "journal"

    def settle(self, within_s: float = START_S) -> bool:
        """Waits until all rails of the relays are UP; returns False after ``within_s`` s."""
        journals = Journals([self.journal_folder(node) for node in (0, 1)])
        return wait_until(journals.all_up, within_s, LOOK_S)

    def rails_lost(self, since_ns: int) -> int:
        """Returns the number of losses of rails that relays have recorded since a time."""
        journals = Journals([self.journal_folder(node) for node in (0, 1)])
        return sum(
            event.kind == "rail_state" and "->DOWN" in event.text and event.time_ns >= since_ns
            for book in journals.read()
            for event in book.events
        )

    def mark(self, name: str) -> dict[str, Any]:
        """Returns the round trips of :mod:`r2serve.bench.control.talk` since the last mark."""
        self.programs[0].say(f"mark {name}")
        return self.programs[0].hear("mark")

    def relay(self, node: int) -> psutil.Process:
        """Returns the relay of a node. Raises ControlError without exactly one."""
        own = [each for each in self._processes() if is_relay_of(each[1], node)]
        if len(own) != 1:
            raise ControlError(f"node {node} has {len(own)} relays")
        return own[0][0]

    def worker(self, node: int) -> psutil.Process:
        """Returns the process of a rank. Raises ControlError without exactly one."""
        own = [
            process
            for process, words in self._processes()
            if str(TALK) in words and "relay" not in words and _rank_of(process) == str(node)
        ]
        if len(own) != 1:
            raise ControlError(f"node {node} has {len(own)} ranks")
        return own[0]

    def _processes(self) -> Iterator[tuple[psutil.Process, list[str]]]:
        for process in psutil.process_iter():
            try:
                words, folder = process.cmdline(), process.cwd()
            except (psutil.Error, OSError):
                continue  # the process has just ended, or belongs to another user
            if words and folder == str(self._work):
                yield process, words


def is_relay_of(words: Sequence[str], node: int) -> bool:
    """Whether a command line is a relay.

    The parent of a relay, and the program that enters a node, have ``--`` and a command.
    """
    if "relay" not in words or "--" in words or "--node" not in words:
        return False
    return words[words.index("--node") + 1] == str(node)


def _rank_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("RANK")
    except (psutil.Error, OSError):
        return None


def talk(*arguments: str) -> list[str]:
    """Returns the command of a rank."""
    return [sys.executable, str(TALK), *arguments]


@contextmanager
def lab_of(nics: int) -> Iterator[Lab]:
    """Yields a lab whose nodes have this number of NICs, the management NIC included."""
    with Lab(nodes=2, rails=nics - 1) as lab:
        yield lab
