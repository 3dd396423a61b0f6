"""A set of namespaces, and the process that keeps it (see namespaces.py)."""

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
    """This machine or this user cannot have a lab; the text says why."""


class LabCommandError(RuntimeError):
    """A command that builds the lab or makes a fault failed; the text is what it said."""


class Holder:
    """One set of namespaces and the process that keeps it."""

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
        """Runs a short command in the namespaces and returns its rc, out and end time (at_ns)."""
        return self._checked(argv, " ".join(argv))

    def set_down(self, device: str) -> int:
        """Sets a link down, without starting a program; returns when that was done (at_ns)."""
        return int(self._checked({"down": device}, f"set {device} down")["at_ns"])

    def unplug(self, port: str, bridge: str) -> int:
        """Takes a port off a bridge, without starting a program; returns when that was done."""
        order = {"unplug": port, "bridge": bridge}
        return int(self._checked(order, f"unplug {port} from {bridge}")["at_ns"])

    def kill_all(self) -> None:
        if self._ask("kill-all")["rc"] != 0:
            raise LabCommandError(f"{self.name}: some processes do not die")

    def _checked(self, command: Sequence[str] | dict[str, str], what: str) -> dict[str, Any]:
        answer = self._ask(command)
        if answer["rc"] != 0:
            raise LabCommandError(f"{self.name}: {what}: {answer['out'].strip()}")
        return answer

    def _ask(self, command: Sequence[str] | dict[str, str]) -> dict[str, Any]:
        assert self._process.stdin is not None
        # Switch and nodes may be worked by a fault thread while the main thread runs commands.
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
            # Killing the outer process kills the holder by its parent-death signal.
            self._process.kill()
            self._process.wait()
