"""Processes of Python that need not import torch: forked from one that has.

`import torch` takes two seconds of a processor, and the tests start hundreds of processes that
want it.  A process of Forks runs the same script, with the same arguments, environment and
standard streams as one that `subprocess.Popen` starts, and ends as an interpreter of its own does.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from r2serve.lab import namespaces

LONGEST_MESSAGE = 200_000


class Forked:
    """A process that was forked: what tests use of `subprocess.Popen`."""

    def __init__(self, forks: Forks, pid: int, streams: Sequence[IO[bytes] | None]) -> None:
        self._forks = forks
        self.pid = pid
        self.stdin, self.stdout = streams
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._forks.ended(self.pid, 0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it has not ended within `timeout` seconds.
        """
        if self.returncode is None:
            self.returncode = self._forks.ended(self.pid, timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forks:
    """Forks processes from one that has imported `modules`.  Not for several threads at a time."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Threads of libraries would be gone in a fork.
        alone = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._parent = subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(theirs.fileno()), *modules],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **alone, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        theirs.close()
        self._ends: dict[int, int] = {}

    def popen(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int,
        stdout: int,
        stderr: IO[bytes],
        node: tuple[int, bool] | None = None,
    ) -> Forked:
        """Start a script: `argv` are the interpreter, the script and its arguments.

        stdin, stdout: subprocess.PIPE, the only kind that is known here. node: for a process in a
        node of a lab, the process that holds its namespaces, and whether one of users is among
        them.
        """
        assert argv[0] == sys.executable
        assert stdin == stdout == subprocess.PIPE
        read_in, write_in = os.pipe()
        read_out, write_out = os.pipe()
        request = {"argv": list(argv[1:]), "env": dict(env), "cwd": os.getcwd(), "node": node}
        socket.send_fds(
            self._ours, [json.dumps(request).encode()], [read_in, write_out, stderr.fileno()]
        )
        for theirs in (read_in, write_out):
            os.close(theirs)
        message = self._hear(None)
        while "forked" not in message:
            message = self._hear(None)
        return Forked(self, message["forked"], [open(write_in, "wb"), open(read_out, "rb")])

    def ended(self, pid: int, timeout_s: float | None) -> int | None:
        """How a process ended, as `subprocess.Popen.returncode`; None: not within that time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while pid not in self._ends:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._hear(left_s):
                return None
        return self._ends.pop(pid)

    def close(self) -> None:
        self._ours.close()
        self._parent.wait(10)

    def _hear(self, timeout_s: float | None) -> dict[str, Any]:
        """The next message, which is noted; an empty one: none came within that time."""
        if not select.select([self._ours], [], [], timeout_s)[0]:
            return {}
        data = self._ours.recv(LONGEST_MESSAGE)
        if not data:
            raise RuntimeError("the process that forks has ended")
        message: dict[str, Any] = json.loads(data)
        if "ended" in message:
            self._ends[message["ended"]] = message["status"]
        return message


def serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork a process a request.

    Returns in each of them, with what it is to do; None: in this process, when nobody asks any
    more.
    """
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([connection, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _tell_ends(connection)
        if connection in ready:
            data, descriptors, _, _ = socket.recv_fds(connection, LONGEST_MESSAGE, 3)
            if not data:
                return None
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for each in (woken, wake):
                    os.close(each)
                return json.loads(data), descriptors
            for each in descriptors:
                os.close(each)
            connection.send(json.dumps({"forked": pid}).encode())


def _tell_ends(connection: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            connection.send(json.dumps({"ended": pid, "status": code}).encode())


def become(request: Mapping[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """Be the process that was asked for."""
    namespaces.die_with_parent()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", closefd=False)
    if request["node"] is not None:
        holder, user = request["node"]
        os.setsid()
        namespaces.enter(str(holder), user, lambda: run(request["argv"]))
    run(request["argv"])


def run(argv: Sequence[str]) -> NoReturn:
    """Run a script, as an interpreter does."""
    sys.argv = list(argv)
    sys.path.insert(0, str(Path(argv[0]).parent))
    runpy.run_path(argv[0], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    for module in sys.argv[2:]:
        __import__(module)
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        told = serve(asked)
    if told is not None:
        become(*told)
