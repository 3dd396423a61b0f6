"""The coordinator's side of the control channel to a contender's workers, a line per command.

Between commands a worker blocks on the control socket and uses no CPU time.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from r2serve.bench.collectives.contenders import Launch

START_TIMEOUT_S = 90.0
ANSWER_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 10.0


class WorkerError(RuntimeError):
    """A worker ended, hung or sent an invalid answer; the message has the end of the worker log."""


class WrongResult(WorkerError):
    """A collective returned a wrong result."""


class NotSupported(RuntimeError):
    """A worker does not support the request."""


@dataclass(frozen=True)
class Timed:
    """Times of a slice of back-to-back collectives, in nanoseconds.

    times_ns: by rank, then by iteration. cpu_ns: user and system time of each rank's process,
    all threads.
    """

    times_ns: list[list[int]]
    cpu_ns: list[int]


class _Connection:
    """The socket of a worker, read line by line with a deadline."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray()

    def send(self, line: str) -> None:
        self._socket.sendall(line.encode() + b"\n")

    def line(self, deadline: float) -> str:
        while b"\n" not in self._buffer:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            piece = self._socket.recv(1 << 16)
            if not piece:
                raise ConnectionResetError("closed its control connection")
            self._buffer += piece
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        return line.decode()

    def close(self) -> None:
        self._socket.close()


class WorkerGroup:
    """The workers of a contender; a context manager that ends the processes on exit."""

    def __init__(self, name: str, launch: Launch, ranks: int, control: Path, log: Path) -> None:
        """Starts the processes, and waits for connections of all ``ranks`` to ``control``."""
        self.name = name
        self._log = log
        self._ranks = ranks
        self._connections: list[_Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._prepared: str | None = None
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.bind(str(control))
                listener.listen(ranks)
                self._start(launch)
                self._accept(listener)
        except BaseException:
            self.close()
            raise
        finally:
            control.unlink(missing_ok=True)

    def _start(self, launch: Launch) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **launch.environment}
        with self._log.open("wb") as log:
            for process in launch.processes:
                self._processes.append(
                    process.spawn(
                        process.command,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )
                )

    def _accept(self, listener: socket.socket) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        by_rank: dict[int, _Connection] = {}
        listener.settimeout(0.2)
        while len(by_rank) < self._ranks:
            try:
                connection = _Connection(listener.accept()[0])
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise self._failure("did not start in time") from None
                if any(process.poll() is not None for process in self._processes):
                    raise self._failure("ended while starting") from None
                continue
            by_rank[int(connection.line(deadline).removeprefix("hello "))] = connection
        self._connections = [by_rank[rank] for rank in range(self._ranks)]

    def prepare(self, request: str, *, anew: bool = False) -> None:
        """Makes ``request`` the current collective, and checks the result of a single call.

        The keyword argument forces a new preparation, even if ``request`` is already current.
        Raises NotSupported when the workers refuse the request, and WrongResult when a worker
        gets a wrong result.
        """
        if request == self._prepared and not anew:
            return
        self._prepared = None
        answers = self._ask(request)
        for rank, answer in enumerate(answers):
            if answer.startswith("wrong "):
                raise WrongResult(f"{self.name} worker of rank {rank}: {answer}")
        for answer in answers:
            if answer.startswith("error "):
                raise NotSupported(answer.removeprefix("error "))
            if answer != "ok":
                raise self._failure(f"answered {answer[:80]!r}")
        self._prepared = request

    def run(self, warmup: int, iterations: int) -> Timed:
        """Runs the timed loop; warm-up calls are not in the times."""
        answers = self.ask(f"run {warmup} {iterations}", "times")
        times = [[int(value) for value in answer[1:]] for answer in answers]
        return Timed(times, [int(answer[0]) for answer in answers])

    def ask(self, line: str, expected: str) -> list[list[str]]:
        """Sends ``line`` to all ranks, and returns the words of each answer without the first word.

        Raises WorkerError when the first word of an answer is not ``expected``.
        """
        return self._checked(self._ask(line), expected)

    def _checked(self, answers: list[str], expected: str) -> list[list[str]]:
        words = []
        for answer in answers:
            first, *rest = answer.split()
            if first != expected:
                raise self._failure(f"answered {answer[:200]!r}")
            words.append(rest)
        return words

    def ask_one(self, rank: int, line: str, expected: str) -> list[str]:
        """Sends ``line`` to a single rank; see ask."""
        (words,) = self._checked(self._ask(line, self._connections[rank : rank + 1]), expected)
        return words

    def _ask(self, line: str, whom: list[_Connection] | None = None) -> list[str]:
        connections = self._connections if whom is None else whom
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        try:
            for connection in connections:
                connection.send(line)
            return [connection.line(deadline) for connection in connections]
        except TimeoutError:
            raise self._failure(f"gave no answer to {line!r}") from None
        except OSError as error:
            raise self._failure(f"{error} during {line!r}") from error

    def _failure(self, what: str) -> WorkerError:
        tail = self._log.read_text(errors="replace").strip()[-1500:]
        return WorkerError(f"{self.name} worker {what}" + (f"\n{tail}" if tail else ""))

    def close(self) -> None:
        for connection in self._connections:
            try:
                connection.send("quit")
            except OSError:
                continue  # the worker has ended; the loop below reaps the process
        deadline = time.monotonic() + (STOP_TIMEOUT_S if self._connections else 0.0)
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for connection in self._connections:
            connection.close()
        self._connections = []
        self._processes = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
