#!/usr/bin/env python3
"""Runs a command on a kernel with RDMA devices (Soft-RoCE), on a machine without any.

    guest.py [--uml KERNEL] [--rails 2x2] [--timeout 600] [--keep DIR] -- COMMAND [ARG...]
    guest.py --fetch

The command runs as root, with this machine's files at the same paths, the current directory and
the current environment. All its changes to files are discarded, except below ``--keep``. Its
output and exit status are passed on. Exit status 124: timeout; 125: the command never ran.

The guest is QEMU with Debian's kernel, fetched once; without hardware virtualisation QEMU works
but is much slower. With ``--uml`` the guest is a User-Mode Linux built by ``build_uml.sh``: a
process with a single CPU and a boot time of 1 s.
"""

from __future__ import annotations

import argparse
import lzma
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("R2SERVE_GUEST_CACHE", "/var/cache/r2serve-guest"))
KERNEL_PACKAGE = "linux-image-6.12-amd64"
"""Older kernels lose completions of a port that goes down."""
BOOT_MODULES = ("virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TIMED_OUT, NEVER_RAN = 124, 125


class GuestError(RuntimeError):
    """The guest could not be created or did not boot."""


# ---- the kernel ----


def kernel_tree() -> Path:
    """Returns the path of the unpacked kernel package; fetches the package once."""
    package = _newest_kernel()
    tree = CACHE / package
    if not tree.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE, prefix="new.") as scratch:
            new = Path(scratch) / "tree"
            new.mkdir()
            # Runs as root, because the user _apt may not write here.
            _call(
                "apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", package, cwd=scratch
            )
            [archive] = Path(scratch).glob("*.deb")
            _call("dpkg-deb", "-x", str(archive), str(new))
            _call("depmod", "-b", str(new), _version(new))
            new.rename(tree)
    return tree


def _newest_kernel() -> str:
    """Returns the versioned package behind the unversioned KERNEL_PACKAGE."""
    for attempt in range(2):
        answer = subprocess.run(
            ["apt-cache", "depends", KERNEL_PACKAGE], capture_output=True, text=True, check=False
        )
        for line in answer.stdout.splitlines():
            kind, _, package = line.strip().partition(": ")
            if kind == "Depends" and package.startswith("linux-image-"):
                return package
        if attempt == 0:
            _call("apt-get", "update", "-q")
    raise GuestError(f"no package {KERNEL_PACKAGE}: {answer.stderr.strip()}")


def _call(*command: str, cwd: str | None = None) -> None:
    done = subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode != 0:
        raise GuestError(f"{shlex.join(command)}: {done.stdout.strip()}")


def _version(tree: Path) -> str:
    [modules] = (tree / "lib/modules").iterdir()
    return modules.name


def _module_files(tree: Path) -> list[Path]:
    """Returns the modules needed to boot, dependencies first."""
    files: list[Path] = []
    for module in BOOT_MODULES:
        listing = subprocess.run(
            ["modprobe", "-d", str(tree), "-S", _version(tree), "--show-depends", module],
            capture_output=True,
            text=True,
            check=True,
        )
        for line in listing.stdout.splitlines():
            verb, _, path = line.partition(" ")
            if verb == "insmod" and Path(path.strip()) not in files:
                files.append(Path(path.strip()))
    return files


# ---- the initial file system ----

INIT = """#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
while read -r module; do insmod "/modules/$module"; done < /modules/order
mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=512000,cache=loose host /host
mount -t tmpfs -o size=75% tmpfs /changes
mkdir /changes/upper /changes/work
mount -t overlay -o lowerdir=/host,upperdir=/changes/upper,workdir=/changes/work overlay /whole
for directory in proc sys dev; do mount --move /$directory /whole/$directory; done
exec switch_root /whole /bin/bash "$(cat /exchange)/second"
"""


def _initial_files(tree: Path, exchange: Path) -> Iterator[tuple[str, int, bytes]]:
    """Yields name, mode and content of each file; directories have no content."""
    for directory in ["bin", "proc", "sys", "dev", "host", "changes", "whole", "modules"]:
        yield directory, 0o040755, b""
    yield "init", 0o100755, INIT.encode()
    yield "exchange", 0o100644, str(exchange).encode()
    yield "bin/busybox", 0o100755, Path("/bin/busybox").read_bytes()
    order = []
    for path in _module_files(tree):
        content = path.read_bytes()
        if path.suffix == ".xz":
            content, path = lzma.decompress(content), path.with_suffix("")
        order.append(path.name)
        yield f"modules/{path.name}", 0o100644, content
    yield "modules/order", 0o100644, ("\n".join(order) + "\n").encode()


def write_cpio(files: Iterator[tuple[str, int, bytes]], to: Path) -> None:
    """Writes the "new" format of cpio(5), for the kernel to unpack."""
    with to.open("wb") as archive:

        def add(number: int, name: str, mode: int, content: bytes) -> None:
            fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
            head = b"070701" + b"".join(b"%08X" % field for field in fields)
            for part in (head + name.encode() + b"\0", content):
                archive.write(part + b"\0" * (-len(part) % 4))

        number = 0
        for number, (name, mode, content) in enumerate(files, 1):
            add(number, name, mode, content)
        add(number + 1, "TRAILER!!!", 0, b"")


# ---- scripts inside the guest ----


def _rails(layout: str) -> str:
    nodes, _, rails = layout.partition("x")
    return f"{HERE}/rails.sh create {nodes} {rails}" if layout else "true"


def _command_script(command: list[str]) -> str:
    lines = ["#!/bin/bash"]
    for name, value in os.environ.items():
        if name.isidentifier():
            lines.append(f"export {name}={shlex.quote(value)}")
    lines.append(f"PATH=$PATH:{PATH}:{HERE}")
    lines.append(f"cd {shlex.quote(os.getcwd())} || exit {NEVER_RAN}")
    lines.append("exec " + shlex.join(command))
    return "\n".join(lines) + "\n"


def _finish(exchange: Path, output: str, rails: str) -> str:
    """Returns a script to create the rails, run the command and write its exit status."""
    # Names are looked up in files alone: the guest has no name server, and a query takes seconds.
    return f"""ip link set lo up
export PATH={PATH}
printf '%s: files\\n' passwd group hosts > /etc/nsswitch.conf
if ! {rails} > /dev/console 2>&1; then exec busybox poweroff -f; fi
mkfifo /run/output
cat /run/output > {output} &
bash {exchange}/command > /run/output 2>&1
echo $? > {exchange}/status
timeout 10 tail --pid=$! -f /dev/null # a stray process may keep the output open
exec busybox poweroff -f
"""


def boot_qemu(arguments: argparse.Namespace, exchange: Path) -> int:
    tree = kernel_tree()
    write_cpio(_initial_files(tree, exchange), exchange / "initrd")
    keep = arguments.keep
    second = f"""mount -t tmpfs tmpfs /run
mkdir -p /dev/shm /dev/pts /lib/modules
mount -t tmpfs tmpfs /dev/shm
mount -t devpts devpts /dev/pts
mount --bind {tree}/lib/modules /lib/modules
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000 exchange {exchange}
"""
    if keep:
        second += f"mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000 keep {keep}\n"
    finish = _finish(exchange, "/dev/vport*p1", _rails(arguments.rails))
    (exchange / "second").write_text(second + finish)

    def share(tag: str, path: Path | str, option: str = "") -> list[str]:
        return [
            "-virtfs",
            f"local,mount_tag={tag},path={path},security_model=none,multidevs=remap{option}",
        ]

    [kernel] = (tree / "boot").glob("vmlinuz-*")
    command = [
        "qemu-system-x86_64",
        *_accelerator(),
        *("-m", arguments.memory, "-smp", "2", "-nodefaults", "-display", "none", "-no-reboot"),
        *("-serial", f"file:{exchange}/console", "-kernel", str(kernel)),
        *("-initrd", str(exchange / "initrd")),
        *("-append", "console=ttyS0 quiet panic=-1 oops=panic mitigations=off"),
        *share("host", "/", ",readonly=on"),
        *share("exchange", exchange),
        *(share("keep", keep) if keep else []),
        *("-device", "virtio-serial", "-chardev", "file,id=output,path=/dev/stdout"),
        *("-device", "virtserialport,chardev=output"),
    ]
    return _run(command, arguments.timeout)


def _accelerator() -> list[str]:
    # Without vmx or svm, /dev/kvm is paravirtual, and no stock kernel boots there.
    flags = Path("/proc/cpuinfo").read_text().split()
    if os.access("/dev/kvm", os.W_OK) and ("vmx" in flags or "svm" in flags):
        return ["-accel", "kvm", "-cpu", "host"]
    return ["-accel", "tcg,thread=multi", "-cpu", "max"]


def boot_uml(arguments: argparse.Namespace, exchange: Path) -> int:
    mounts = "".join(
        f"mount -t hostfs -o {path} none .{path}\n" for path in (exchange, arguments.keep) if path
    )
    (exchange / "init").write_text(f"""#!/bin/bash
export PATH={PATH}
mount -t tmpfs tmpfs /mnt
mkdir /mnt/upper /mnt/work /mnt/root
mount -t overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work overlay /mnt/root
cd /mnt/root
for what in proc:proc sysfs:sys devtmpfs:dev tmpfs:run; do
    mount -t ${{what%:*}} none ${{what#*:}}
done
mkdir -p dev/shm dev/pts
mount -t tmpfs tmpfs dev/shm
{mounts}exec chroot . /bin/bash {exchange}/second
""")
    (exchange / "init").chmod(0o755)
    finish = _finish(exchange, "/dev/tty1", _rails(arguments.rails))
    (exchange / "second").write_text("stty -F /dev/tty1 -opost\n" + finish)
    command = [
        str(arguments.uml),
        f"mem={arguments.memory}",
        *("rootfstype=hostfs", "rootflags=/", "ro", f"init={exchange}/init"),
        *("con=null", "con0=null,fd:2", "con1=null,fd:1", "quiet", "panic=-1"),
    ]
    # Kernel messages of User-Mode Linux go to standard error.
    with (exchange / "console").open("w") as console:
        return _run(command, arguments.timeout, stderr=console, TMPDIR="/dev/shm")


def _run(command: list[str], timeout: float, stderr: object = None, **environment: str) -> int:
    """Runs `command` in a separate process group, and kills the group at the end."""
    running = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,  # the guest reopens /dev/stdout by name, which works for pipes
        stderr=stderr,  # type: ignore[call-overload]
        env=os.environ | environment,
        start_new_session=True,
    )
    assert running.stdout is not None
    copier = threading.Thread(target=_copy, args=(running.stdout,), daemon=True)
    copier.start()
    try:
        status = running.wait(timeout)
        copier.join(10)
        return status
    except subprocess.TimeoutExpired:
        return TIMED_OUT
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()


def _copy(output: IO[bytes]) -> None:
    while part := os.read(output.fileno(), 65536):
        sys.stdout.buffer.write(part)
        sys.stdout.buffer.flush()


def fetch() -> int:
    try:
        kernel_tree()
    except (GuestError, OSError) as error:
        sys.stderr.write(f"guest.py: {error}\n")
        return NEVER_RAN
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--uml", type=Path, help="kernel built by build_uml.sh")
    parser.add_argument("--rails", default="2x2", help="NODESxRAILS to create; empty = no rails")
    parser.add_argument("--timeout", type=float, default=600, help="time limit in seconds")
    parser.add_argument("--memory", default="4G")
    parser.add_argument("--keep", type=lambda text: Path(text).resolve())
    parser.add_argument("--fetch", action="store_true", help="fetch the kernel for QEMU and exit")
    parser.add_argument("command", nargs="*")
    arguments = parser.parse_args()
    if arguments.fetch:
        return fetch()
    if not arguments.command:
        parser.error("no command")
    exchange = Path(tempfile.mkdtemp(prefix="r2serve-guest."))
    try:
        (exchange / "command").write_text(_command_script(arguments.command))
        boot = boot_uml if arguments.uml else boot_qemu
        ended = boot(arguments, exchange)
        status = exchange / "status"
        if status.exists() and status.read_text().strip():
            return int(status.read_text())
        console = exchange / "console"
        if console.exists():
            sys.stderr.write(
                "\n".join(console.read_text(errors="replace").splitlines()[-30:]) + "\n"
            )
        if ended == TIMED_OUT:
            sys.stderr.write(f"guest.py: timeout after {arguments.timeout:g} s\n")
            return TIMED_OUT
        raise GuestError("the guest stopped before the command ended")
    except (GuestError, OSError) as error:
        sys.stderr.write(f"guest.py: {error}\n")
        return NEVER_RAN
    finally:
        shutil.rmtree(exchange, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
