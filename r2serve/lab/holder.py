"""Client of a holder: the process with a set of namespaces (see namespaces.py)."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAMESPACES = Path(__file__).with_name("namespaces.py")


class LabUnavailableError(RuntimeError):
    """A lab cannot be built on this machine or by this user; the text names the reason."""


class LabCommandError(RuntimeError):
    """A command of the lab failed; the text contains the output of the command."""


class Holder:
    """A set of namespaces, held by a child process. Thread-safe: a lock orders the commands."""

    def __init__(self, name: str, *options: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(NAMESPACES), "hold", *options, "--name", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._lock = threading.Lock()
        self.pid = 0
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def _wait_until_ready(self) -> None:
        ready = False
        while not (ready and self.pid):
            answer = self._read()
            if "error" in answer:
                raise LabUnavailableError(f"cannot make namespaces: {answer['error']}")
            self.pid = answer.get("init", self.pid)
            ready = ready or "ready" in answer

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise LabCommandError(f"the holder of {self.name} ended unexpectedly")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, *argv: str) -> dict[str, Any]:
        """Runs a short command in the namespaces.

        Returns rc (exit status), out (output) and at_ns (end time, CLOCK_MONOTONIC in ns). Raises
        LabCommandError if rc is not 0.
        """
        return self._checked(argv, " ".join(argv))

    def set_down(self, device: str) -> int:
        """Sets a link down by ioctl; returns the time, CLOCK_MONOTONIC in ns."""
        return int(self._checked({"down": device}, f"set {device} down")["at_ns"])

    def unplug(self, port: str, bridge: str) -> int:
        """Removes a port from a bridge by ioctl; returns the time, CLOCK_MONOTONIC in ns."""
        order = {"unplug": port, "bridge": bridge}
        return int(self._checked(order, f"unplug {port} from {bridge}")["at_ns"])

    def kill_all(self) -> None:
        """Kills all processes of a node's namespaces; raises LabCommandError if some survive."""
        if self._ask("kill-all")["rc"] != 0:
            raise LabCommandError(f"{self.name}: some processes do not die")

    def _checked(self, command: Sequence[str] | dict[str, str], what: str) -> dict[str, Any]:
        answer = self._ask(command)
        if answer["rc"] != 0:
            raise LabCommandError(f"{self.name}: {what}: {answer['out'].strip()}")
        return answer

    def _ask(self, command: Sequence[str] | dict[str, str]) -> dict[str, Any]:
        assert self._process.stdin is not None
        # A fault thread may use the holder concurrently with the main thread.
        with self._lock:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
            return self._read()

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            # The parent-death signal then kills the inner process.
            self._process.kill()
            self._process.wait()
