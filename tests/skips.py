"""Compares the skips of a run with the expected skips of tests/skips.toml.

An entry names surroundings, a fact about the machine. This file measures the surroundings, apart
from the tests, so a test that skips on a machine with its requirements fails the run.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import shutil
import socket
import subprocess
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
FILE = Path(__file__).with_suffix(".toml")
SYSCALL_USER_DISPATCH = 59
MPTCP = 262
GIB = 1 << 30
USER_NAMESPACE = ("--user", "--map-root-user")


@dataclass(frozen=True)
class Skip:
    """A skipped test, with the name of its stage."""

    stage: str
    test: str
    reason: str


@dataclass(frozen=True)
class Expected:
    """An entry of the list; reason, tests: patterns. No stages = all, no surroundings = any."""

    reason: str
    tests: str = "*"
    stages: tuple[str, ...] = ()
    surroundings: str = ""

    def fits(self, skip: Skip) -> bool:
        return (
            fnmatchcase(skip.reason, self.reason)
            and fnmatchcase(skip.test, self.tests)
            and (not self.stages or skip.stage in self.stages)
            and (not self.surroundings or holds(self.surroundings))
        )


def expected(file: Path = FILE) -> list[Expected]:
    """Reads the list.

    Raises:
        ValueError: an entry names unknown surroundings.
    """
    entries = tomllib.loads(file.read_text(encoding="utf-8"))["skip"]
    found = [Expected(**{**each, "stages": tuple(each.get("stages", ()))}) for each in entries]
    unknown = {each.surroundings for each in found} - {"", *SURROUNDINGS}
    if unknown:
        raise ValueError(f"{file.name}: unknown surroundings: {', '.join(sorted(unknown))}")
    return found


def unexpected(found: Sequence[Skip], entries: Sequence[Expected]) -> list[Skip]:
    """Returns the skips without an entry for these surroundings."""
    return [skip for skip in found if not any(entry.fits(skip) for entry in entries)]


@functools.cache
def holds(surroundings: str) -> bool:
    return SURROUNDINGS[surroundings]()


def _fails(*command: str) -> bool:
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return True
    return done.returncode != 0


def _lacks_labs(*options: str) -> bool:
    """Whether the namespaces, mounts and links of a lab cannot be made (see r2serve/lab)."""
    command = ["unshare", *options, "--mount", "--ipc", "--net", "--pid", "--fork", "--mount-proc"]
    view = "mount -t sysfs -o nosuid,nodev,noexec sysfs /sys"
    links = "ip link add br0 type bridge && ip link add va0 type veth"
    return _fails(*command, "sh", "-c", f"{view} && {links}")


def _lacks_labs_of_this_user() -> bool:
    return _lacks_labs(*([] if os.geteuid() == 0 else USER_NAMESPACE))


def _lacks_sockets(family: int, protocol: int = 0) -> Callable[[], bool]:
    def lacks() -> bool:
        try:
            with socket.socket(family, socket.SOCK_STREAM, protocol):
                return False
        except OSError:
            return True

    return lacks


def _lacks_nvcc() -> bool:
    home = os.environ.get("CUDA_HOME", "")
    return shutil.which("nvcc") is None and not (home and Path(home, "bin", "nvcc").exists())


def _lacks_cpu_quotas() -> bool:
    first, two = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cgroup.procs")
    controllers = two.with_name("cgroup.subtree_control")
    if first.parent.is_dir():
        return not (first.exists() and os.access(first.parent, os.W_OK))
    return not (
        os.access(two, os.W_OK)
        and controllers.exists()
        and "cpu" in controllers.read_text().split()
    )


def _lacks_python_312() -> bool:
    program = "import sys; sys.exit(sys.version_info[:2] != (3, 12))"
    found = ["python3.12", *map(str, Path.home().glob(".pyenv/versions/3.12*/bin/python"))]
    return all(_fails(python, "-c", program) for python in found)


def _lacks_dispatch() -> bool:
    if platform.machine() != "x86_64":  # the test has no other trampoline
        return True
    return ctypes.CDLL(None).prctl(SYSCALL_USER_DISPATCH, 0, 0, 0, 0) != 0


def _memory_below(bytes_: int) -> Callable[[], bool]:
    return lambda: psutil.virtual_memory().total < bytes_


def _lacks(command: str) -> Callable[[], bool]:
    return lambda: shutil.which(command) is None


SURROUNDINGS: dict[str, Callable[[], bool]] = {
    "a GPU": lambda: any(Path("/dev").glob("nvidia[0-9]*")),
    "less than 12 GiB of memory": _memory_below(12 * GIB),
    "less than 16 GiB of memory": _memory_below(16 * GIB),
    "neither x86-64 nor 64-bit ARM": lambda: platform.machine() not in ("x86_64", "aarch64"),
    "no CPU quotas": _lacks_cpu_quotas,
    "one CPU": lambda: len(os.sched_getaffinity(0)) < 2,
    "no Chromium": _lacks("chromium"),
    "no IPv6": _lacks_sockets(socket.AF_INET6),
    "no MPTCP": _lacks_sockets(socket.AF_INET, MPTCP),
    "no Python 3.12": _lacks_python_312,
    "no bridges": lambda: _fails("unshare", "-n", "ip", "link", "add", "br0", "type", "bridge"),
    "no dispatch of system calls to the process": _lacks_dispatch,
    "no git checkout": lambda: _fails("git", "-C", str(ROOT), "rev-parse", "--git-dir"),
    "no kubectl": _lacks("kubectl"),
    "no labs": _lacks_labs_of_this_user,
    "no labs in user namespaces": lambda: _lacks_labs(*USER_NAMESPACE),
    "no network namespaces": lambda: _fails("unshare", "-n", "true"),
    "no nvcc": _lacks_nvcc,
    "no nvcc in PATH": _lacks("nvcc"),
    "no old commits": lambda: _fails("git", "-C", str(ROOT), "cat-file", "-e", "a419eeb^{commit}"),
    "no root": lambda: os.geteuid() != 0,
    "no scheduler statistics": lambda: not Path("/proc/thread-self/schedstat").exists(),
    "no systemd-analyze": _lacks("systemd-analyze"),
    "not x86-64": lambda: platform.machine() != "x86_64",
}
"""Facts about the machine by name."""
