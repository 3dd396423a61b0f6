"""Networks for stock engines over two rails: routes to a virtual address, or MPTCP."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from r2serve.lab.holder import LabCommandError
from r2serve.lab.lab import Lab
from r2serve.lab.nodes import Node
from r2serve.lab.serving.plan import ServeError

BIRD_PATHS = "/usr/local/sbin:/usr/sbin:/sbin"
ROUTES_TIMEOUT_S = 15.0
LOOK_S = 0.1
MPTCP_PORT = 29600
VIRTUAL_DEVICE = "vip0"
_PRELOAD = Path(__file__).parent / "native" / "multipath.cc"

_BIRD = """\
router id {mine};
protocol device {{}}
protocol bfd {{
  interface "rail*" {{ interval 50 ms; multiplier 3; }};
}}
protocol kernel {{
  merge paths on;
  ipv4 {{ export filter {{ krt_prefsrc = {mine}; accept; }}; }};
}}
protocol static {{
  ipv4;
  route {theirs}/32{nexthops};
}}
"""


class Network(Protocol):
    """Configures the network of a lab for a contender. Both methods raise ServeError on failure."""

    def build(self, lab: Lab, work: Path) -> dict[str, str]:
        """Configures a new lab, once; returns environment variables for the servers."""

    def begin(self, lab: Lab, work: Path) -> None:
        """Prepares the start of a server; no process runs on the nodes at this time."""


class Plain:
    """The lab's rails without further configuration."""

    def build(self, lab: Lab, work: Path) -> dict[str, str]:
        return {}

    def begin(self, lab: Lab, work: Path) -> None: ...


class VirtualAddress:
    """A virtual address of each node, with BIRD's routes over all rails.

    BFD removes a route after 3 times 50 ms of silence. Fabrics with routing to the host use the
    same set-up. The kernel spreads connections over the routes by port numbers.
    """

    SYSCTLS = (
        "net.ipv4.fib_multipath_hash_policy=1",
        "net.ipv4.fib_multipath_use_neigh=1",
        "net.ipv4.conf.all.ignore_routes_with_linkdown=1",
    )

    def build(self, lab: Lab, work: Path) -> dict[str, str]:
        try:
            for node in _serving(lab):
                node.run("ip", "link", "add", VIRTUAL_DEVICE, "type", "bridge")
                node.run("ip", "address", "add", f"{virtual(node)}/32", "dev", VIRTUAL_DEVICE)
                node.run("ip", "link", "set", VIRTUAL_DEVICE, "addrgenmode", "none", "up")
                for setting in self.SYSCTLS:
                    node.run("sysctl", "-q", "-w", setting)
        except LabCommandError as error:
            raise ServeError(f"no virtual address: {error}") from error
        return {"GLOO_SOCKET_IFNAME": VIRTUAL_DEVICE}

    def begin(self, lab: Lab, work: Path) -> None:
        bird = shutil.which("bird") or shutil.which("bird", path=BIRD_PATHS)
        if bird is None:
            raise ServeError("the command `bird` is not installed (package bird2)")
        nodes = _serving(lab)
        for node, peer in zip(nodes, reversed(nodes), strict=True):
            path = work / f"bird{node.index}.conf"
            path.write_text(bird_configuration(node, peer), encoding="ascii")
            with path.with_suffix(".log").open("wb") as log:
                run = [bird, "-f", "-c", str(path), "-s", str(path.with_suffix(".control"))]
                node.popen(run, stdout=log, stderr=log)
        deadline = time.monotonic() + ROUTES_TIMEOUT_S
        while not all(self._both_ways(node, lab.rails) for node in nodes):
            if time.monotonic() > deadline:
                raise ServeError(
                    f"BIRD has no routes over all rails after {ROUTES_TIMEOUT_S:.0f} s"
                )
            time.sleep(LOOK_S)

    @staticmethod
    def _both_ways(node: Node, rails: int) -> bool:
        return node.run("ip", "route", "show", "proto", "bird").count("nexthop") == rails


class Multipath:
    """MPTCP: each connection begins on a rail, and the kernel adds a subflow on the other rail."""

    def build(self, lab: Lab, work: Path) -> dict[str, str]:
        preload = compile_preload(work)
        limits = ["subflow", str(lab.rails), "add_addr_accepted", str(lab.rails)]
        try:
            for node in _serving(lab):
                node.run("ip", "mptcp", "limits", "set", *limits)
                for rail in range(1, lab.rails):
                    # An endpoint with a port makes the kernel listen: gloo listens only on rail 0.
                    place = [node.rail_address(rail), "port", str(MPTCP_PORT), "dev", f"rail{rail}"]
                    node.run("ip", "mptcp", "endpoint", "add", *place, "signal")
        except LabCommandError as error:
            raise ServeError(f"no MPTCP: {error}") from error
        return {"LD_PRELOAD": str(preload)}

    def begin(self, lab: Lab, work: Path) -> None: ...


def compile_preload(work: Path) -> Path:
    """Compiles the library that turns TCP sockets of a program into MPTCP sockets.

    Raises ServeError without a compiler, or when the compilation fails.
    """
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        raise ServeError("no C++ compiler: the contender mptcp needs to compile a library")
    target = work / "multipath.so"
    command = [compiler, "-O2", "-shared", "-fPIC", str(_PRELOAD), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ServeError(
            f"{compiler} does not compile {_PRELOAD.name}: {done.stderr.strip()[-400:]}"
        )
    return target


def virtual(node: Node) -> str:
    return f"10.78.0.{node.index + 1}"


def bird_configuration(node: Node, peer: Node) -> str:
    """Returns BIRD's configuration: routes to the peer's virtual address over all rails."""
    rails = range(node.rails)
    nexthops = "".join(f" via {peer.rail_address(rail)} bfd" for rail in rails)
    return _BIRD.format(mine=virtual(node), theirs=virtual(peer), nexthops=nexthops)


def _serving(lab: Lab) -> Sequence[Node]:
    """Returns the two serving nodes; further nodes run clients."""
    return lab.nodes[:2]
