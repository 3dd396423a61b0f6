"""Queries of commands and kernel tables of this machine; each may be missing or may fail."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_ADMINISTRATORS = "/usr/local/sbin:/usr/sbin:/sbin"
"""Folders of administration tools, missing from some users' search path."""


@dataclass(frozen=True)
class CommandOutput:
    """Output of a command."""

    text: str = ""
    why_not: str = ""
    """Reason for missing output; empty: success."""


def ask(*command: str) -> CommandOutput:
    """Runs a read-only command, for at most 10 s."""
    search = os.pathsep.join((os.environ.get("PATH", os.defpath), _ADMINISTRATORS))
    program = shutil.which(command[0], path=search)
    if program is None:
        return CommandOutput(why_not=f"{command[0]} is not installed")
    try:
        done = subprocess.run(
            [program, *command[1:]], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return CommandOutput(why_not=str(error))
    if done.returncode == 0:
        return CommandOutput(done.stdout)
    complaint = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return CommandOutput(why_not=f"{command[0]}: {complaint[0]}")


def may_lock_anything() -> bool:
    """Whether this process has CAP_IPC_LOCK, so that no limit on locked memory applies."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> 14 & 1)
    return False


def local_ports() -> tuple[int, int]:
    """Returns the first and last ephemeral port of the kernel."""
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except OSError:
        return 32768, 60999
    return int(low), int(high)


def reserved_ports() -> str:
    """Returns the kernel's list of ports kept free of outgoing connections; empty: none."""
    try:
        return Path("/proc/sys/net/ipv4/ip_local_reserved_ports").read_text().strip()
    except OSError:
        return ""
