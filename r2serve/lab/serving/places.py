"""Places for the demo's nodes: nodes of a lab, or this machine if no lab is available."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

import psutil

from r2serve.lab import namespaces
from r2serve.lab.nodes import Node, Starter

# Rail addresses without a lab; all of 127.0.0.0/8 is loopback on Linux.
LOOPBACK_RAILS = ("127.0.0.2", "127.0.0.3")


class Place(Protocol):
    """Interface of a node to start and kill processes."""

    @property
    def address(self) -> str:
        """Address of the node's management port."""
        ...

    def popen(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: int | IO[bytes] | None = None,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
    ) -> subprocess.Popen[bytes]: ...

    def kill_all(self) -> None:
        """Kills every process started here, with all descendants."""
        ...


class LabPlace:
    """A node of a lab.

    rail: the rail that carries control traffic, too; None: the node has a management NIC.
    """

    def __init__(self, node: Node, rail: int | None = None) -> None:
        self._node = node
        self._rail = rail
        self.popen = node.popen
        self.kill_all = node.kill_all

    @property
    def address(self) -> str:
        return self._node.address(self._rail)


class LocalPlace(Starter):
    """This machine, without namespaces."""

    address = "127.0.0.1"

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def _prefix(self) -> list[str]:
        return [sys.executable, "-I", "-S", str(namespaces.__file__), "guard"]

    def kill_all(self) -> None:
        victims: list[psutil.Process] = []
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                victims.extend(psutil.Process(process.pid).children(recursive=True))
            # Also kills orphaned descendants in the same process group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        for process in self._processes:
            process.wait()
        psutil.wait_procs(victims, timeout=10)
        self._processes.clear()


def free_port(address: str) -> int:
    """Returns a TCP port free at the moment of the call."""
    with socket.socket() as sock:
        sock.bind((address, 0))
        return int(sock.getsockname()[1])
