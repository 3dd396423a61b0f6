"""Creates, holds and enters Linux namespaces for the lab. Run by path; standard library only.

    namespaces.py hold [--user | --join-user PID] [--node]
    namespaces.py enter PID [--user] -- COMMAND...
    namespaces.py guard -- COMMAND...

The namespaces have no name in the file system, so their lifetime is the holder's lifetime. The
holder ends when the other end of the standard input closes. The kernel therefore removes a lab
with the creating process, SIGKILL included. A node is also a PID namespace with the holder as init,
so no process of a node outlives the holder.

`guard` is for machines without namespaces: the parent's death kills the command.

The script runs by path under `python -I -S` for a short start-up time.
"""

import ctypes
import errno
import fcntl
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

# <linux/sched.h>, <sys/mount.h>, <sys/prctl.h>, <linux/sockios.h>, <linux/if.h>
CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MS_REC, MS_PRIVATE = 16384, 1 << 18
PR_SET_PDEATHSIG = 1
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
SIOCBRDELIF = 0x89A3

_libc = ctypes.CDLL(None, use_errno=True)


def _check(what: str, result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    _check("unshare", _libc.unshare(flags))


def set_namespace(descriptor: int) -> None:
    _check("setns", _libc.setns(descriptor, 0))


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    _check(
        f"mount {kind or 'flags'} on {target}",
        _libc.mount(
            source.encode(),
            target.encode(),
            kind.encode() if kind else None,
            ctypes.c_ulong(flags),
            data.encode() if data else None,
        ),
    )


def die_with_parent() -> None:
    _check("prctl", _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def become_root_of_own_user_namespace() -> None:
    uid, gid = os.getuid(), os.getgid()
    unshare(CLONE_NEWUSER)
    # An unprivileged process may map its group only after giving up setgroups (user_namespaces(7)).
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def set_link(device: str, *, up: bool) -> None:
    name = device.encode()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sH22x", name, 0)
        flags = struct.unpack("16sH22x", fcntl.ioctl(sock, SIOCGIFFLAGS, request))[1]
        flags = flags | IFF_UP if up else flags & ~IFF_UP
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sH22x", name, flags))


def unplug(port: str, bridge: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16si20x", bridge.encode(), socket.if_nametoindex(port))
        try:
            fcntl.ioctl(sock, SIOCBRDELIF, request)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: the port is not in the bridge
                raise


def mount_node_view() -> None:
    """Mounts private /proc, /sys and /dev/shm, so a node appears as a separate machine."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    # sysfs shows the network devices of the mounting namespace.
    mount("sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    # Names of shared memory repeat between nodes, so each node needs a private /dev/shm.
    mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")


def _run(argv: list[str]) -> dict[str, Any]:
    read_end, write_end = os.pipe()
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, write_end, 1),
        (os.POSIX_SPAWN_DUP2, write_end, 2),
    ]
    try:
        pid = os.posix_spawnp(argv[0], argv, os.environ, file_actions=actions)
    except OSError as error:
        os.close(read_end)
        return {"rc": 127, "out": str(error)}
    finally:
        os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        output = pipe.read().decode(errors="replace")
    _, status = os.waitpid(pid, 0)
    return {"rc": os.waitstatus_to_exitcode(status), "out": output, "at_ns": time.monotonic_ns()}


def _reap_orphans() -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def _living() -> bool:
    """Returns True if the PID namespace has a non-zombie process besides the init."""
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                if file.read().rpartition(") ")[2][:1] != "Z":
                    return True
        except OSError:
            continue  # the process ended since the listing
    return False


def _kill_all() -> dict[str, Any]:
    if os.getpid() != 1:
        return {"rc": 1, "out": "only a node can kill all of its processes"}
    deadline = time.monotonic() + 10
    while _living() and time.monotonic() < deadline:
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            break
        time.sleep(0.005)
        _reap_orphans()
    return {"rc": int(_living()), "out": "", "at_ns": time.monotonic_ns()}


def _make_fault(order: dict[str, str]) -> dict[str, Any]:
    """Makes a fault by ioctl; a started program would take CPU time from the measured ranks."""
    try:
        if "bridge" in order:
            unplug(order["unplug"], order["bridge"])
        else:
            set_link(order["down"], up=False)
    except OSError as error:
        return {"rc": 1, "out": str(error)}
    return {"rc": 0, "out": "", "at_ns": time.monotonic_ns()}


def _answer(command: Any) -> dict[str, Any]:
    if command == "kill-all":
        return _kill_all()
    return _make_fault(command) if isinstance(command, dict) else _run(command)


def serve_commands() -> None:
    """Executes a command per line of standard input until end of file.

    A line is JSON: a list (argv of a short command), an object ({"down": DEVICE} or
    {"unplug": DEVICE, "bridge": DEVICE}), or the string "kill-all".
    """
    pending = b""
    while True:
        # The timeout lets the init reap orphans of the node, which become children of the init.
        ready, _, _ = select.select([0], [], [], 1.0)
        _reap_orphans()
        if not ready:
            continue
        data = os.read(0, 65536)
        if not data:
            return
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            os.write(1, json.dumps(_answer(json.loads(line))).encode() + b"\n")


def hold(options: list[str]) -> int:
    user, node, join = "--user" in options, "--node" in options, ""
    if "--join-user" in options:
        join = options[options.index("--join-user") + 1]
    try:
        if user:
            become_root_of_own_user_namespace()
        elif join:
            with open(f"/proc/{join}/ns/user", "rb") as file:
                set_namespace(file.fileno())
        unshare(CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWIPC | (CLONE_NEWPID if node else 0))
    except OSError as error:
        os.write(1, json.dumps({"error": str(error)}).encode() + b"\n")
        return 1
    child = os.fork()
    if child == 0:
        os._exit(_hold_inside(node))
    os.write(1, json.dumps({"init": child}).encode() + b"\n")
    os.close(0)
    os.close(1)
    _, status = os.waitpid(child, 0)
    return max(0, os.waitstatus_to_exitcode(status))


def _hold_inside(node: bool) -> int:
    try:
        die_with_parent()
        if node:
            mount_node_view()
        set_link("lo", up=True)
    except OSError as error:
        os.write(1, json.dumps({"error": str(error)}).encode() + b"\n")
        return 1
    os.write(1, json.dumps({"ready": True}).encode() + b"\n")
    serve_commands()
    return 0


def enter(pid: str, user: bool, inside: Callable[[], NoReturn]) -> NoReturn:
    """Runs `inside` in the namespaces of `pid`, except those shared with the calling process.

    A user namespace allows no entry into a namespace of its parent. The calling process stays
    outside as a stand-in: forwards signals and passes on the exit status.
    """
    directory = os.getcwd()
    names = ["user"] if user else []
    try:
        descriptors = [
            os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
            for name in [*names, "pid", "net", "ipc", "mnt"]
            if not os.path.samefile(f"/proc/{pid}/ns/{name}", f"/proc/self/ns/{name}")
        ]
        for descriptor in descriptors:
            set_namespace(descriptor)
            os.close(descriptor)
        os.chdir(directory)
    except OSError as error:
        os.write(2, f"cannot enter the namespaces of process {pid}: {error}\n".encode())
        os._exit(125)
    # setns() to a PID namespace affects only children, hence the fork.
    child = os.fork()
    if child == 0:
        die_with_parent()
        inside()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: os.kill(child, received))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def execute(argv: list[str]) -> NoReturn:
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        os._exit(127)


def guard(argv: list[str]) -> NoReturn:
    die_with_parent()
    os.execvp(argv[0], argv)


def main(argv: list[str]) -> int:
    if argv[:1] == ["hold"]:
        return hold(argv[1:])
    if argv[:1] == ["enter"] and "--" in argv:
        split = argv.index("--")
        enter(argv[1], "--user" in argv[2:split], lambda: execute(argv[split + 1 :]))
    if argv[:2] == ["guard", "--"] and len(argv) > 2:
        guard(argv[2:])
    sys.stderr.write(f"usage: {__doc__}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
