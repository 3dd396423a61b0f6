"""Faults of a port made by the operating system, and a guardian process for their end.

The guardian runs in a separate session, and so survives Ctrl-C and ``kill -9`` of its parent. The
guardian undoes the fault and exits.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from r2serve.drills.order import DrillError

Command = tuple[str, ...]

_PLAIN_QDISCS = ("noqueue", "pfifo_fast", "fq_codel", "fq", "mq")


@dataclass(frozen=True)
class SystemFault:
    """Commands for the start and the end of a fault, with its duration."""

    make: list[Command]
    undo: list[Command]
    seconds: float
    period_s: float = 0.0
    """Period of a repeated fault in seconds: half present, half absent; 0: a single fault."""


def plan(
    kind: str, device: str, address: str, seconds: float, *, mbit: float, period_s: float
) -> SystemFault:
    """Returns the commands for a drill's fault at a port.

    Raises:
        DrillError: this process or this port is unsuitable; the text contains the reason.
    """
    if kind == "corrupt":
        raise DrillError("by: the system cannot corrupt packets; must be engine")
    _check_port(device, address)
    if kind in ("carrier_loss", "flap"):
        _check_restorable(device)
        link = (_tool("ip"), "link", "set", "dev", device)
        down: Command = (*link, "down")
        up: Command = (*link, "up")
        return SystemFault([down], [up], seconds, period_s if kind == "flap" else 0.0)
    if kind == "slow":
        _check_queue(device)
        burst = max(16 * 1024, int(mbit * 125_000 / 2000))
        shape = ("tbf", "rate", f"{mbit}mbit", "burst", f"{burst}", "latency", "20ms")
        root = ("dev", device, "root")
        make: Command = (_tool("tc"), "qdisc", "replace", *root, *shape)
        return SystemFault([make], [(_tool("tc"), "qdisc", "del", *root)], seconds)
    hooks = [("output", "oifname")]
    if kind == "black_hole":
        hooks.append(("input", "iifname"))
    table = f"inet r2serve_drill_{''.join(c if c.isalnum() else '_' for c in device)}"
    rules = "; ".join(
        [
            f"add table {table}",
            *(
                f"add chain {table} {hook} {{ type filter hook {hook} priority -300; }}; "
                f'add rule {table} {hook} {word} "{device}" drop'
                for hook, word in hooks
            ),
        ]
    )
    nft = _tool("nft")
    return SystemFault([(nft, rules)], [(nft, f"delete table {table}")], seconds)


class Guardian:
    """A running system fault."""

    def __init__(self, fault: SystemFault) -> None:
        """Makes the fault.

        Raises:
            DrillError: a command failed; the fault is undone.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from r2serve.drills.system import guard; guard()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self._begin(fault)
        except BaseException:
            self.end()  # the fault may exist already
            raise

    def _begin(self, fault: SystemFault) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._process.stdin.write(json.dumps(asdict(fault)).encode())
        self._process.stdin.close()
        if self._process.stdout.readline() != b"made\n":
            said = self._process.stderr.read().decode(errors="replace").strip()
            raise DrillError(f"by: the system could not make the fault: {said}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> bool:
        """Waits for the end of the drill; returns whether the fault is undone."""
        return self._process.wait() == 0

    def end(self) -> bool:
        """Ends the drill early; returns whether the fault is undone."""
        self._process.terminate()
        return self.wait()


def guard() -> None:
    """Runs the guardian: reads a fault, makes the fault, and undoes the fault after its time."""
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: over.set())
    given = json.load(sys.stdin)
    fault = SystemFault(
        [tuple(each) for each in given["make"]],
        [tuple(each) for each in given["undo"]],
        given["seconds"],
        given["period_s"],
    )
    failed = _run(fault.make)
    made = True
    if not failed:
        # The reader of the pipe may be gone, but the fault must still be undone.
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        with contextlib.suppress(BrokenPipeError):
            os.write(1, b"made\n")
        made = _last(fault, over)
    if made:
        failed = _run(fault.undo) or failed
    if failed:
        sys.stderr.write(failed)
        sys.exit(1)


def _last(fault: SystemFault, over: threading.Event) -> bool:
    """Waits for the end of the drill; returns whether the fault is present at the end."""
    timer = threading.Timer(fault.seconds, over.set)
    timer.daemon = True
    timer.start()
    made = True
    while not over.wait(fault.period_s / 2 if fault.period_s else None):
        _run(fault.undo if made else fault.make)
        made = not made
    return made


def _run(commands: list[Command]) -> str:
    """Runs all commands; returns the failures as text."""
    said = []
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            said.append(f"{' '.join(command)}: {done.stderr.strip()}")
    return "; ".join(said)


def _check_port(device: str, address: str) -> None:
    if os.geteuid() != 0:
        raise DrillError("by: a fault by the system needs root; without root must be engine")
    if not Path("/sys/class/net", device).exists():
        raise DrillError(f"by: network device {device!r} does not exist here")
    addresses = {one.address for one in psutil.net_if_addrs().get(device, [])}
    if address.rpartition(":")[0].strip("[]") not in addresses:
        raise DrillError(
            f"by: {device} here has no address {address!r}: the port is in another network "
            "namespace; must be engine here"
        )


def _check_restorable(device: str) -> None:
    """Refuses a port with addresses or routes that would be lost by a down and up.

    The kernel restores only its own routes and IPv6 link-local addresses.
    """
    (link,) = _listed(_tool("ip"), "-json", "address", "show", "dev", device)
    if "UP" not in link["flags"]:
        raise DrillError(f"by: {device} is already down; must be up")
    if any(one["family"] == "inet6" and one["scope"] == "global" for one in link["addr_info"]):
        raise DrillError(
            f"by: {device} has an IPv6 address, which the fault would remove; must be engine"
        )
    for family in ("-4", "-6"):
        shown = (family, "-json", "route", "show", "table", "all", "dev", device)
        if any(route.get("protocol") != "kernel" for route in _listed(_tool("ip"), *shown)):
            raise DrillError(
                f"by: {device} has routes, which the fault would remove; must be engine"
            )


def _check_queue(device: str) -> None:
    for queue in _listed(_tool("tc"), "-json", "qdisc", "show", "dev", device, "root"):
        if queue.get("kind") not in _PLAIN_QDISCS or queue.get("handle", "0:") != "0:":
            raise DrillError(
                f"by: {device} has a non-default queueing discipline, {queue['kind']}, which the "
                "fault would remove; must be engine"
            )


def _listed(*command: str) -> list[dict[str, Any]]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise DrillError(f"by: {' '.join(command)}: {done.stderr.strip()}")
    found: list[dict[str, Any]] = json.loads(done.stdout or "[]")
    return found


def _tool(name: str) -> str:
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if found is None:
        raise DrillError(f"by: the command {name} is not installed; install {name} or use engine")
    return found
