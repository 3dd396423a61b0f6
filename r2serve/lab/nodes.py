"""The machines of a lab: addresses, and commands and processes in them."""

from __future__ import annotations

import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from r2serve.lab.holder import NAMESPACES, Holder


def rail_address(rail: int, node: int) -> str:
    return f"10.77.{rail + 1}.{node + 1}"


def management_address(node: int) -> str:
    return f"10.77.0.{node + 1}"


class Starter(ABC):
    """Starts processes, each by a command that puts it where it belongs."""

    _processes: list[subprocess.Popen[bytes]]

    @abstractmethod
    def _prefix(self) -> list[str]:
        """The command that what is started are the last arguments of."""

    def popen(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: int | IO[bytes] | None = subprocess.DEVNULL,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Starts a long-running command, in a session of its own."""
        process = subprocess.Popen(
            [*self._prefix(), "--", *argv],
            env=None if env is None else dict(env),
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        self._processes.append(process)
        return process


@dataclass
class Node(Starter):
    """One machine of the lab."""

    index: int
    rails: int
    holder: Holder
    _user: bool
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def management_address(self) -> str:
        return management_address(self.index)

    def rail_address(self, rail: int) -> str:
        return rail_address(rail, self.index)

    def run(self, *argv: str) -> str:
        """Runs a short command in the node and returns what it printed."""
        return str(self.holder.run(*argv)["out"])

    @property
    def namespaces(self) -> tuple[int, bool]:
        """The process that holds the namespaces of the node; whether one of users is among them."""
        return self.holder.pid, self._user

    def _prefix(self) -> list[str]:
        user = ["--user"] if self._user else []
        return [sys.executable, "-I", "-S", str(NAMESPACES), "enter", str(self.holder.pid), *user]

    def kill_all(self) -> None:
        """Kills every process of the node, whatever session it moved to, and only those."""
        # First those who stand in for the processes outside: one that is still on its way in
        # would otherwise arrive after the killing.
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes.clear()
        self.holder.kill_all()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        self.holder.close()
        for process in self._processes:
            process.wait()
        self._processes.clear()
