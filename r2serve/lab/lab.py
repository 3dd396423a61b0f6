"""A lab: nodes with several rails each on a single machine, and network faults.

Every node is a set of namespaces (network, mount with a private /dev/shm, PID, IPC). Port i of a
node is an end of a veth pair. The other end is a port of bridge `rail<i>` in the switch, a further
namespace. A fault can thus be made at its real place: at the NIC, at the switch port, or in the
switch with the carrier up. A management port per node goes through a separate bridge.

The lab changes nothing outside of its namespaces. The kernel removes the lab when the creating
process ends (see namespaces.py).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from r2serve.lab.faults import Faults, bridge_name, nic_name, port_name
from r2serve.lab.holder import NAMESPACES, Holder, LabCommandError, LabUnavailableError
from r2serve.lab.nodes import Node

logger = logging.getLogger(__name__)

_sequence = itertools.count()


def lab_name(pid: int, sequence: int) -> str:
    """Returns the name of a process's `sequence`-th lab, visible in holders' command lines."""
    return f"r2serve-lab-{pid}-{sequence}"


def owner_pid(name: str) -> int | None:
    """Returns the pid in a lab's name; None if the name is not from a lab."""
    parts = name.split("-")
    if len(parts) != 4 or parts[:2] != ["r2serve", "lab"] or not parts[2].isdigit():
        return None
    return int(parts[2])


class Lab(Faults):
    """Nodes and rails as a context manager.

    nodes, rails: 1 to 200 each. user_namespace: True builds inside a user namespace; None does so
    for users other than root. Entering raises LabUnavailableError if this user may not create
    namespaces.
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
        self._switch: Holder | None = None

    @property
    def rootless(self) -> bool:
        """True if the lab is inside a user namespace."""
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
        """Kills every process of the lab and waits for the end of the namespaces."""
        # Boxes end before their ports. Their errors are raised after everything has ended.
        errors: list[LabCommandError] = []
        for port in list(self._boxes):
            try:
                self._end_box(*port)
            except LabCommandError as error:
                errors.append(error)
        for node in self.nodes:
            node.close()
        self.nodes.clear()
        if self._switch is not None:
            self._switch.close()
            self._switch = None
        if errors:
            raise errors[0]

    def _build(self) -> None:
        if sys.platform != "linux":
            raise LabUnavailableError("a lab needs Linux namespaces")
        if shutil.which("ip") is None:
            raise LabUnavailableError("the command `ip` (package iproute2) is not installed")
        own = ["--user"] if self._rootless else []
        self._switch = switch = Holder(f"{self.name}-switch", *own)
        join = ["--join-user", str(switch.pid)] if self._rootless else []
        networks: list[int | None] = [*range(self.rails), None]
        for bridge in map(bridge_name, networks):
            switch.run("ip", "link", "add", bridge, "type", "bridge", "mcast_snooping", "0")
            switch.run("ip", "link", "set", bridge, "addrgenmode", "none", "up")
        for index in range(self._count):
            holder = Holder(f"{self.name}-node{index}", "--node", *join)
            node = Node(index, self.rails, holder, self._rootless)
            self.nodes.append(node)
            for rail in networks:
                self._plug(node, rail)
        logger.info(
            "%s: %d nodes with %d rails each%s",
            self.name,
            self._count,
            self.rails,
            " in a user namespace" if self._rootless else "",
        )

    def _plug(self, node: Node, rail: int | None) -> None:
        """Connects a NIC of the node to the switch: a rail, or the management NIC (None)."""
        switch = self._require_switch()
        port, nic, bridge = port_name(node.index, rail), nic_name(rail), bridge_name(rail)
        peer = ["peer", "name", nic, "netns", str(node.holder.pid)]
        switch.run("ip", "link", "add", port, "type", "veth", *peer)
        switch.run("ip", "link", "set", port, "addrgenmode", "none", "master", bridge, "up")
        node.run("ip", "link", "set", nic, "addrgenmode", "none", "up")
        node.run("ip", "address", "add", f"{node.address(rail)}/24", "dev", nic)

    def _require_switch(self) -> Holder:
        if self._switch is None:
            raise LabUnavailableError("the lab is not built: use it as a context manager")
        return self._switch

    def run_in_switch(self, *argv: str) -> str:
        """Runs a short command (ip, tc, nft …) in the switch's namespace; returns the output."""
        return str(self._require_switch().run(*argv)["out"])


def holders_of_dead_processes(proc: Path = Path("/proc")) -> list[tuple[int, str]]:
    """Returns (pid, lab name) of holders whose creating process has ended.

    A holder normally ends by itself within moments; a holder still listed later is stuck.
    """
    found = []
    for directory in proc.iterdir():
        if not directory.name.isdigit():
            continue
        try:
            arguments = (directory / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # the process ended since the listing
        if str(NAMESPACES) not in arguments or "--name" not in arguments:
            continue
        name = arguments[arguments.index("--name") + 1].rpartition("-")[0]
        owner = owner_pid(name)
        if owner is not None and not (proc / str(owner)).exists():
            found.append((int(directory.name), name))
    return found


def sweep(patience_s: float = 2.0) -> int:
    """Kills holders left by dead processes, after patience_s; returns the number killed."""
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
