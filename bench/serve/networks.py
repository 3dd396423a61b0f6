"""What operators give stock engines over two rails today: routes to a virtual address, or MPTCP."""

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
from r2serve.lab.serving.serve import ServeError

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
    """Makes a lab's network what a contender needs; both raise ServeError where that cannot be."""

    def build(self, lab: Lab, work: Path) -> dict[str, str]:
        """Once, when the lab is new; returns what servers need in their environment."""

    def begin(self, lab: Lab, work: Path) -> None:
        """Whenever a server is about to start, and no process runs on its nodes."""


class Plain:
    """Rails as they are."""

    def build(self, lab: Lab, work: Path) -> dict[str, str]:
        return {}

    def begin(self, lab: Lab, work: Path) -> None: ...


class VirtualAddress:
    """An address of the node itself, reached over every rail that answers BFD, 3 times 50 ms.

    The routes are BIRD's, as in fabrics that are routed to the host; the kernel spreads connections
    over them by their ports.
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
                raise ServeError(f"BIRD has no routes over all rails in {ROUTES_TIMEOUT_S:.0f} s")
            time.sleep(LOOK_S)

    @staticmethod
    def _both_ways(node: Node, rails: int) -> bool:
        return node.run("ip", "route", "show", "proto", "bird").count("nexthop") == rails


class Multipath:
    """MPTCP: each connection begins on one rail, and the kernel joins the other one to it."""

    def build(self, lab: Lab, work: Path) -> dict[str, str]:
        preload = compile_preload(work)
        limits = ["subflow", str(lab.rails), "add_addr_accepted", str(lab.rails)]
        try:
            for node in _serving(lab):
                node.run("ip", "mptcp", "limits", "set", *limits)
                for rail in range(1, lab.rails):
                    # With a port of its own the kernel listens there: gloo does so on rail 0 alone.
                    place = [node.rail_address(rail), "port", str(MPTCP_PORT), "dev", f"rail{rail}"]
                    node.run("ip", "mptcp", "endpoint", "add", *place, "signal")
        except LabCommandError as error:
            raise ServeError(f"no MPTCP: {error}") from error
        return {"LD_PRELOAD": str(preload)}

    def begin(self, lab: Lab, work: Path) -> None: ...


def compile_preload(work: Path) -> Path:
    """What makes a program's TCP sockets MPTCP's. Raises ServeError where there is no compiler."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        raise ServeError("no C++ compiler: what turns TCP into MPTCP is compiled here")
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
    """BIRD's, for routes of a node to its peer's virtual address over all rails."""
    rails = range(node.rails)
    nexthops = "".join(f" via {peer.rail_address(rail)} bfd" for rail in rails)
    return _BIRD.format(mine=virtual(node), theirs=virtual(peer), nexthops=nexthops)


def _serving(lab: Lab) -> Sequence[Node]:
    """The two nodes that serve; further ones are clients."""
    return lab.nodes[:2]
