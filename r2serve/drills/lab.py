"""A lab: nodes with several rails each, on one machine, and the faults one can give them.

Every node is a set of namespaces (network, mount with its own /dev/shm, PID, IPC). Port i of each
node is one end of a veth pair; the other end is a port of bridge `rail<i>` in a further namespace,
the switch, so that a fault can be made where a real one happens: at the NIC, at the switch port,
or in the switch with the carrier still up. A management port per node goes through its own bridge.

No command of the lab changes anything outside the namespaces that it made, and nothing of it
outlives the process that made it (see namespaces.py).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from r2serve.drills.faults import Faults, rail_port

logger = logging.getLogger("r2serve.drills.lab")

_NAMESPACES = Path(__file__).with_name("namespaces.py")
_sequence = itertools.count()


class LabUnavailableError(RuntimeError):
    """This machine or this user cannot have a lab; the text says why."""


class LabCommandError(RuntimeError):
    """A command that builds the lab or makes a fault failed; the text is what it said."""


def lab_name(pid: int, sequence: int) -> str:
    """Name of the sequence-th lab of process pid; it stands in the holders' command lines."""
    return f"r2serve-lab-{pid}-{sequence}"


def owner_pid(name: str) -> int | None:
    """The process that a lab's name says it belongs to, None if it is no lab's name."""
    parts = name.split("-")
    if len(parts) != 4 or parts[:2] != ["r2serve", "lab"] or not parts[2].isdigit():
        return None
    return int(parts[2])


def rail_address(rail: int, node: int) -> str:
    return f"10.77.{rail + 1}.{node + 1}"


def management_address(node: int) -> str:
    return f"10.77.0.{node + 1}"


class _Holder:
    """One set of namespaces and the process that keeps it."""

    def __init__(self, name: str, *options: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_NAMESPACES), "hold", *options, "--name", name],
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


@dataclass
class Node:
    """One machine of the lab."""

    index: int
    rails: int
    _holder: _Holder
    _user: bool
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def management_address(self) -> str:
        return management_address(self.index)

    def rail_address(self, rail: int) -> str:
        return rail_address(rail, self.index)

    def run(self, *argv: str) -> str:
        """Runs a short command in the node and returns what it printed."""
        return str(self._holder.run(*argv)["out"])

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
        """Starts a long-running command in the node, in a session of its own."""
        user = ["--user"] if self._user else []
        enter = [sys.executable, "-I", "-S", str(_NAMESPACES), "enter", str(self._holder.pid)]
        process = subprocess.Popen(
            [*enter, *user, "--", *argv],
            env=None if env is None else dict(env),
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def kill_all(self) -> None:
        """Kills every process of the node, whatever session it moved to, and only those."""
        # First those who stand in for the processes outside: one that is still on its way in
        # would otherwise arrive after the killing.
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes.clear()
        self._holder.kill_all()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        self._holder.close()
        for process in self._processes:
            process.wait()
        self._processes.clear()


class Lab(Faults):
    """Nodes and rails as a context manager.

    nodes, rails: how many of each (1 to 200, 1 to 200).
    user_namespace: whether to build inside a user namespace; None: when the user is not root.
    Raises LabUnavailableError on entry where the machine allows no namespaces to this user.
    """

    def __init__(
        self, nodes: int = 2, rails: int = 2, *, user_namespace: bool | None = None
    ) -> None:
        if not 1 <= nodes <= 200:
            raise ValueError(f"nodes must be 1 to 200, not {nodes}")
        if not 1 <= rails <= 200:
            raise ValueError(f"rails must be 1 to 200, not {rails}")
        super().__init__()
        self.name = lab_name(os.getpid(), next(_sequence))
        self.rails = rails
        self.nodes: list[Node] = []
        self._count = nodes
        self._rootless = os.geteuid() != 0 if user_namespace is None else user_namespace
        self._switch: _Holder | None = None

    @property
    def rootless(self) -> bool:
        """Whether the lab stands in a user namespace."""
        return self._rootless

    def __enter__(self) -> Lab:
        try:
            self._build()
        except BaseException as error:
            self.close()
            if isinstance(error, LabCommandError):
                raise LabUnavailableError(f"cannot build the network: {error}") from error
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process of the lab and waits until the namespaces are gone."""
        for node in self.nodes:
            node.close()
        self.nodes.clear()
        if self._switch is not None:
            self._switch.close()
            self._switch = None

    def _build(self) -> None:
        if sys.platform != "linux":
            raise LabUnavailableError("a lab needs Linux namespaces")
        if shutil.which("ip") is None:
            raise LabUnavailableError("the command `ip` (package iproute2) is not installed")
        own = ["--user"] if self._rootless else []
        self._switch = switch = _Holder(f"{self.name}-switch", *own)
        join = ["--join-user", str(switch.pid)] if self._rootless else []
        bridges = [f"rail{rail}" for rail in range(self.rails)] + ["mgmt"]
        for bridge in bridges:
            switch.run("ip", "link", "add", bridge, "type", "bridge", "mcast_snooping", "0")
            switch.run("ip", "link", "set", bridge, "addrgenmode", "none", "up")
        for index in range(self._count):
            holder = _Holder(f"{self.name}-node{index}", "--node", *join)
            node = Node(index, self.rails, holder, self._rootless)
            self.nodes.append(node)
            for rail in range(self.rails):
                self._plug(node, rail_port(index, rail), f"rail{rail}", node.rail_address(rail))
            self._plug(node, f"n{index}m", "mgmt", node.management_address)
        logger.info(
            "%s: %d nodes with %d rails each%s",
            self.name,
            self._count,
            self.rails,
            " in a user namespace" if self._rootless else "",
        )

    def _plug(self, node: Node, port: str, bridge: str, address: str) -> None:
        """Joins the switch port `port` of `bridge` with a NIC of the node named like the bridge."""
        switch = self._require_switch()
        nic = "mgmt0" if bridge == "mgmt" else bridge
        peer = ["peer", "name", nic, "netns", str(node._holder.pid)]
        switch.run("ip", "link", "add", port, "type", "veth", *peer)
        switch.run("ip", "link", "set", port, "addrgenmode", "none", "master", bridge, "up")
        node.run("ip", "link", "set", nic, "addrgenmode", "none", "up")
        node.run("ip", "address", "add", f"{address}/24", "dev", nic)

    def _require_switch(self) -> _Holder:
        if self._switch is None:
            raise LabUnavailableError("the lab is not built: use it as a context manager")
        return self._switch

    def run_in_switch(self, *argv: str) -> str:
        """Runs a short command (ip, tc, nft …) among the switch's ports and returns its output."""
        return str(self._require_switch().run(*argv)["out"])


def holders_of_dead_processes(proc: Path = Path("/proc")) -> list[tuple[int, str]]:
    """Holders whose maker no longer runs, as (pid, lab name).

    They end by themselves within moments; one that is still listed later is stuck.
    """
    found = []
    for directory in proc.iterdir():
        if not directory.name.isdigit():
            continue
        try:
            arguments = (directory / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # it ended while we were looking
        if str(_NAMESPACES) not in arguments or "--name" not in arguments:
            continue
        name = arguments[arguments.index("--name") + 1].rpartition("-")[0]
        owner = owner_pid(name)
        if owner is not None and not (proc / str(owner)).exists():
            found.append((int(directory.name), name))
    return found


def sweep(patience_s: float = 2.0) -> int:
    """Ends what is left of labs whose maker died, and returns how many holders had to be killed."""
    deadline = time.monotonic() + patience_s
    left = holders_of_dead_processes()
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = holders_of_dead_processes()
    for pid, name in left:
        logger.warning("killing holder %d of the abandoned %s", pid, name)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return len(left)
