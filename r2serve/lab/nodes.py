"""Nodes of a lab: addresses, commands and processes."""

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
    """Starts processes through a prefix command, e.g. to enter a node's namespaces."""

    _processes: list[subprocess.Popen[bytes]]

    @abstractmethod
    def _prefix(self) -> list[str]:
        """Returns the prefix command; the started command follows after `--`."""

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
        """Starts a long-running command in a new session."""
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
    """A node of the lab."""

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

    def address(self, rail: int | None) -> str:
        """Returns the address of a rail, or of the management NIC (None)."""
        return self.management_address if rail is None else self.rail_address(rail)

    def run(self, *argv: str) -> str:
        """Runs a short command in the node and returns what it printed."""
        return str(self.holder.run(*argv)["out"])

    @property
    def namespaces(self) -> tuple[int, bool]:
        """Pid of the process with the node's namespaces, and whether a user namespace is used."""
        return self.holder.pid, self._user

    def _prefix(self) -> list[str]:
        user = ["--user"] if self._user else []
        return [sys.executable, "-I", "-S", str(NAMESPACES), "enter", str(self.holder.pid), *user]

    def kill_all(self) -> None:
        """Kills exactly the processes of the node, in any session."""
        # All at once: the child of a killed process could otherwise still end in good order.
        self.holder.kill_all()
        # A stand-in outside that was still entering the namespaces may have begun its command.
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
