"""A process that may not open netlink sockets, as under seccomp or RestrictAddressFamilies."""

from __future__ import annotations

import ctypes
import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from r2serve.ports.interfaces import list_interfaces
from r2serve.ports.without_netlink import list_interfaces_by_ioctl

PROGRAM = """
import json, logging, sys
from pathlib import Path
from test_without_netlink import refuse_netlink
refuse_netlink()
lines = []
class Kept(logging.Handler):
    def emit(self, record):
        if record.levelno >= logging.WARNING:
            lines.append(record.getMessage())
logging.getLogger().addHandler(Kept())
from r2serve.config import Config
from r2serve.errors import ConfigError
from r2serve.process import acquire, release
from pairs import Pair

try:
    acquire(Config(), 0, "127.0.0.1", False)
    auto = ""
except ConfigError as error:
    auto = str(error)
lines.clear()
own = acquire(Config(rails="lo=127.0.0.1,127.0.0.2"), 0, None, False)
networks = [port.network for port in own.info.ports]
release(own)
pair = Pair(Path(sys.argv[1]))
for rail in (0, 1):
    pair.wait_for_state(rail, "UP")
pair.cut_and_heal(1)
print(json.dumps({"auto": auto, "warnings": lines, "networks": networks}))
pair.close()
"""


class Instruction(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_ushort),
        ("jt", ctypes.c_ubyte),
        ("jf", ctypes.c_ubyte),
        ("k", ctypes.c_uint),
    ]


class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.POINTER(Instruction))]


def refuse_netlink() -> None:
    """Makes socket(AF_NETLINK, …) fail with EAFNOSUPPORT in this process, by seccomp(2)."""
    load, equal, give = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
    number, first_argument = 0, 16  # offsets in struct seccomp_data
    system_call = {"x86_64": 41, "aarch64": 198}[platform.machine()]
    rules = [
        Instruction(load, 0, 0, number),
        Instruction(equal, 0, 3, system_call),
        Instruction(load, 0, 0, first_argument),
        Instruction(equal, 0, 1, 16),  # AF_NETLINK
        Instruction(give, 0, 0, 0x00050000 | 97),  # SECCOMP_RET_ERRNO, EAFNOSUPPORT
        Instruction(give, 0, 0, 0x7FFF0000),  # SECCOMP_RET_ALLOW
    ]
    program = Program(len(rules), (Instruction * len(rules))(*rules))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0  # PR_SET_SECCOMP


def test_the_old_interface_lists_what_netlink_lists() -> None:
    def seen(interfaces: list) -> list:  # type: ignore[type-arg]
        return sorted(
            (one.name, one.index, one.up, one.loopback, sorted(map(str, one.addresses)))
            for one in interfaces
        )

    assert seen(list_interfaces_by_ioctl()) == seen(list_interfaces())
    loopback = next(one for one in list_interfaces_by_ioctl() if one.loopback)
    assert loopback.network_of(loopback.addresses[0]) in ("127.0.0.0/8", "::1/128")
    assert loopback.carrier


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64"), reason="number of socket(2) unknown here"
)
def test_explicit_rails_work_and_auto_says_what_to_set(tmp_path: Path) -> None:
    paths = [str(Path(__file__).parent), *sys.path]
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {paths!r}\n{PROGRAM}", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout.splitlines()[-1])
    assert "rails (R2CCL_RAILS) is 'auto'" in said["auto"]
    assert "set device=address entries, such as R2CCL_RAILS=" in said["auto"]
    assert said["networks"] == ["127.0.0.0/8"] * 2  # one of a listed address, one of a named
    (warning,) = said["warnings"]
    assert "carrier events are missing" in warning
