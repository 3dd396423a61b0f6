"""Starts Python processes as forks of a process with torch imported.

`import torch` takes 2 s of CPU time, vLLM's other imports take 6 s, and the tests start hundreds of
processes with these imports. A fork runs the same script as `subprocess.Popen` would, with the same
arguments, environment and standard streams, and ends like a normal interpreter.

`vllm serve` started by r2serve is a fork, too, if PATH_VARIABLE is set and the folder
`tests/vllm_forked` is on PYTHONPATH. The same holds for vLLM's process for inspecting model
classes.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing import connection, context, forkserver, resource_tracker, spawn
from pathlib import Path
from typing import IO, Any, NoReturn

from timely import patience, stop

from r2serve.lab import namespaces

LONGEST_MESSAGE = 200_000
LONGEST_START_S = 300.0
"""Limit for the imports of the forking process, and for a fork, in seconds times `patience`."""
PATH_VARIABLE = "R2SERVE_TEST_FORKS"
"""Environment variable with the path of the socket for fork requests."""

TORCH = ("numpy", "torch", "torch.distributed")
# vLLM's own modules are left out: their import chooses the platform from the environment.
BESIDE_VLLM = (
    *TORCH,
    *("torch._dynamo", "torch._inductor.standalone_compile", "torch._inductor.lowering"),
    *("transformers", "transformers.models.auto", "openai.types.responses", "openai.types.chat"),
    *("fastapi", "uvicorn", "pydantic", "aiohttp", "PIL.Image", "setproctitle"),
)


class Forked:
    """A forked process, with the part of the interface of `subprocess.Popen` used by tests."""

    def __init__(self, forks: Forks, pid: int, streams: Sequence[IO[bytes] | None]) -> None:
        self._forks = forks
        self.pid = pid
        self.stdin, self.stdout = streams
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._forks.ended(self.pid, 0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end of the process.

        Raises:
            subprocess.TimeoutExpired: the process is still running after `timeout` seconds.
        """
        if self.returncode is None:
            self.returncode = self._forks.ended(self.pid, timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal unless the process has ended; the parent may wait for it at any time."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forks:
    """Forks processes from a parent with `modules` imported. Not thread-safe.

    path: a socket on which other processes may ask for a fork (see stand_in).
    """

    def __init__(self, modules: Sequence[str], path: Path | None = None) -> None:
        self.path = path
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A fork loses the threads of libraries, so the libraries start none.
        alone = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._parent = subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(theirs.fileno()), str(path or ""), *modules],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **alone, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        theirs.close()
        self._ends: dict[int, int] = {}
        self._expect("ready")

    @property
    def environment(self) -> dict[str, str]:
        """Returns the variables with which `vllm serve` becomes a fork."""
        return {
            PATH_VARIABLE: str(self.path),
            "PYTHONPATH": str(Path(__file__).parent / "vllm_forked"),
        }

    def popen(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int = subprocess.DEVNULL,
        stdout: int | IO[bytes],
        stderr: int | IO[bytes],
        node: tuple[int, bool] | None = None,
        session: bool = False,
    ) -> Forked:
        """Starts a script; `argv` holds the interpreter, the script and its arguments.

        stdin, stdout: subprocess.PIPE, subprocess.DEVNULL or (stdout) a file. stderr: a file, or
        subprocess.STDOUT. node: for a process in a node of a lab, the process holding the
        namespaces, and whether these include a user namespace. session: like `start_new_session` of
        `subprocess.Popen`.
        """
        assert argv[0] == sys.executable
        theirs: list[int] = []
        closed: list[int] = []
        ours: list[IO[bytes] | None] = []
        for number, wanted in enumerate((stdin, stdout)):
            if wanted == subprocess.PIPE:
                read, write = os.pipe()
                mine, other = (write, read) if number == 0 else (read, write)
                ours.append(os.fdopen(mine, "wb" if number == 0 else "rb"))
                closed.append(other)
                theirs.append(other)
            elif wanted == subprocess.DEVNULL:
                closed.append(os.open(os.devnull, os.O_RDWR))
                theirs.append(closed[-1])
                ours.append(None)
            else:
                assert not isinstance(wanted, int)
                theirs.append(wanted.fileno())
                ours.append(None)
        theirs.append(theirs[1] if isinstance(stderr, int) else stderr.fileno())
        request = {"argv": list(argv[1:]), "env": dict(env), "cwd": os.getcwd(), "node": node}
        socket.send_fds(self._ours, [json.dumps({**request, "session": session}).encode()], theirs)
        for each in closed:
            os.close(each)
        pid = int(self._expect("forked"))
        self._ends.pop(pid, None)  # of an earlier process with the same number
        return Forked(self, pid, ours)

    def ended(self, pid: int, timeout_s: float | None) -> int | None:
        """Returns the exit code like `subprocess.Popen.returncode`; None = still running."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while pid not in self._ends:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._hear(left_s):
                return None
        return self._ends.pop(pid)

    def close(self) -> None:
        self._ours.close()
        stop(self._parent, "the process that forks")

    def _expect(self, key: str) -> Any:
        """Returns the value of the next message with `key`."""
        deadline = time.monotonic() + LONGEST_START_S * patience()
        while (left_s := deadline - time.monotonic()) > 0:
            message = self._hear(left_s)
            if key in message:
                return message[key]
        raise RuntimeError(f"the process that forks sent no '{key}' within {LONGEST_START_S:g} s")

    def _hear(self, timeout_s: float | None) -> dict[str, Any]:
        """Returns the next message and records an end; {} = no message within `timeout_s`."""
        if not select.select([self._ours], [], [], timeout_s)[0]:
            return {}
        try:
            data = self._ours.recv(LONGEST_MESSAGE)
        except ConnectionResetError:  # its end, with messages that it had not read
            data = b""
        if not data:
            raise RuntimeError("the process that forks has ended")
        message: dict[str, Any] = json.loads(data)
        if "ended" in message:
            self._ends[message["ended"]] = message["status"]
        return message


Request = tuple[dict[str, Any], list[int], socket.socket | None]
"""The request, the standard streams, and the socket of the stand-in process, if there is one."""


def serve(connection: socket.socket, path: str) -> Request | None:
    """Forks a process for each request.

    Returns the request in each forked process. Returns None in this process when `connection`
    closes.
    """
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        waited: list[Any] = [connection, woken]
        if path:
            listener.bind(path)
            listener.listen()
            waited.append(listener)
        connection.send(b'{"ready": true}')
        while True:
            ready, _, _ = select.select(waited, [], [])
            if woken in ready:
                os.read(woken, 4096)
                _tell_ends(connection)
            asking: socket.socket | None = None
            if connection in ready:
                data, streams = _receive(connection)
                if not data:
                    return None
            elif listener in ready:
                asking, _ = listener.accept()
                data, streams = _receive(asking)
                if not data:  # a stand-in that ended before its request
                    asking.close()
                    continue
            else:
                continue
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for each in (woken, wake):
                    os.close(each)
                return json.loads(data), streams, asking
            for each in streams:
                os.close(each)
            if asking is None:
                connection.send(json.dumps({"forked": pid}).encode())
            else:
                asking.close()


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Returns a request and its streams; an empty request = the end of the other side."""
    try:
        data, streams, _, _ = socket.recv_fds(connection, LONGEST_MESSAGE, 3)
    except ConnectionResetError:
        return b"", []
    return data, streams


def _tell_ends(connection: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            connection.send(json.dumps({"ended": pid, "status": code}).encode())


def become(
    request: Mapping[str, Any], streams: Sequence[int], asking: socket.socket | None
) -> NoReturn:
    """Turns this fork into the requested process."""
    namespaces.die_with_parent()
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", closefd=False)
    if asking is not None:
        _watch_over(asking, request["argv"])
    if request["session"]:
        os.setsid()
    if request["node"] is not None:
        holder, user = request["node"]
        os.setsid()
        namespaces.enter(str(holder), user, lambda: run(request["argv"]))
    run(request["argv"])


def _watch_over(asking: socket.socket, argv: Sequence[str]) -> NoReturn:
    """Runs a script in the namespaces of the asking process; ends when either of the two ends.

    The asking process receives the exit code of the script, and sends its signals as messages.
    """
    credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    (there, _, _) = struct.unpack("3i", credentials)
    directory = os.getcwd()
    for name in ("user", "pid", "net", "ipc", "mnt"):
        own, wanted = f"/proc/self/ns/{name}", f"/proc/{there}/ns/{name}"
        if os.readlink(own) != os.readlink(wanted):
            with open(wanted, "rb") as namespace:
                namespaces.set_namespace(namespace.fileno())
    os.chdir(directory)
    child = os.fork()
    if child == 0:
        asking.close()
        namespaces.die_with_parent()
        os.setsid()
        run(argv)
    ended = os.pidfd_open(child)
    awaited: list[int | socket.socket] = [ended, asking]
    while True:
        ready, _, _ = select.select(awaited, [], [])
        if ended in ready:
            _, status = os.waitpid(child, 0)
            asking.send(str(os.waitstatus_to_exitcode(status)).encode())
            os._exit(0)
        told = asking.recv(16)
        if not told:
            os.killpg(child, signal.SIGKILL)
            os._exit(0)
        os.kill(child, int(told))


def stand_in(path: str) -> NoReturn:
    """Acts as the script of this command line; a fork of another process runs the script."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.connect(path)
        request = {"argv": sys.orig_argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}
        socket.send_fds(asking, [json.dumps(request).encode()], [0, 1, 2])
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda received, _: asking.send(str(received).encode()) and None)
        status = int(asking.recv(16) or b"255")
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 255)


def spawn_by_forking() -> None:
    """Makes multiprocessing's "spawn" fork from this process, also inside its child processes.

    The forks have the modules of this process, and the environment of the process that starts them.
    """
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    resource_tracker.ensure_running()
    listener = socket.socket(socket.AF_UNIX)
    address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    listener.bind(address)
    listener.listen()
    alive_read, alive_write = os.pipe()
    prepare, preparation_data = spawn.prepare, spawn.get_preparation_data

    def with_environment(name: str) -> dict[str, Any]:
        return {**preparation_data(name), "environment": dict(os.environ)}

    def prepare_all(data: dict[str, Any]) -> None:
        os.environ.clear()
        os.environ.update(data["environment"])
        prepare(data)

    spawn.get_preparation_data, spawn.prepare = with_environment, prepare_all  # type: ignore[assignment]
    server._forkserver_address = address
    server.ensure_running = lambda: None
    contexts = context._concrete_contexts  # type: ignore[attr-defined]
    contexts["spawn"] = contexts["forkserver"]
    if os.fork() == 0:
        os.close(alive_write)
        forkserver.main(listener.fileno(), alive_read, [])  # type: ignore[attr-defined]
        os._exit(0)
    os.close(alive_read)
    listener.close()
    server._forkserver_alive_fd = alive_write


def run(argv: Sequence[str]) -> NoReturn:
    """Runs a script, or a module after `-m`, like an interpreter does."""
    if argv[0] == "-m":
        sys.argv = list(argv[1:])
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        sys.exit()
    sys.argv = list(argv)
    sys.path.insert(0, str(Path(argv[0]).parent))
    if Path(argv[0]).name == "vllm":
        spawn_by_forking()
    runpy.run_path(argv[0], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    for module in sys.argv[3:]:
        importlib.import_module(module)
    if "setproctitle" in sys.modules:  # locates argv before the environment moves
        sys.modules["setproctitle"].getproctitle()
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        try:
            told = serve(asked, sys.argv[2])
        except (BrokenPipeError, ConnectionResetError):  # the other side ended
            told = None
    if told is None:
        os._exit(0)  # without the finalization of all modules, which takes seconds under load
    become(*told)
