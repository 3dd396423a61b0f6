"""UCX's failover mode as a contender: an endpoint with TCP lanes on both rails of a lab.

UCX has the mode since 1.22, contained in the wheels libucx-cu12 and libucx-cu13. Each fault gets
new workers, because an endpoint never works again after the loss of a message.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from r2serve.bench.collectives.contenders import Launch, WorkerCommand
from r2serve.bench.collectives.control import WorkerGroup
from r2serve.bench.collectives.native.build import BuildError, build, find_tool
from r2serve.lab.lab import Lab

UCX_VARIABLE = "R2SERVE_BENCH_UCX"
NEEDED = (1, 22)

ENVIRONMENT = {
    "UCX_TLS": "tcp",
    # Force eager zero-copy messages on all rails: over TCP, failover can replay no other kind.
    "UCX_RNDV_THRESH": "inf",
    "UCX_ZCOPY_THRESH": "0",
    # Time until a silent lane fails. The kernel's default is about 15 minutes.
    "UCX_TCP_USER_TIMEOUT": "100ms",
    "UCX_KEEPALIVE_INTERVAL": "100ms",
}


class UcxUnavailable(RuntimeError):
    """No UCX with a failover mode is available; the message gives the reason."""


def prefix() -> Path:
    """Returns UCX's prefix: $R2SERVE_BENCH_UCX, else the wheel's folder. Raises UcxUnavailable."""
    given = os.environ.get(UCX_VARIABLE)
    if given:
        return Path(given)
    wheel = importlib.util.find_spec("libucx")
    if wheel is None or wheel.origin is None:
        raise UcxUnavailable(
            f"no UCX; install UCX: `pip install 'libucx-cu12>=1.22'`, or set {UCX_VARIABLE} to a "
            "prefix"
        )
    return Path(wheel.origin).parent


def version(where: Path) -> tuple[int, int]:
    """Returns the version in the headers below ``where``. Raises UcxUnavailable."""
    header = where / "include" / "ucp" / "api" / "ucp_version.h"
    try:
        text = header.read_text(encoding="utf-8")
    except OSError as error:
        raise UcxUnavailable(f"{where} has no UCX: {error}") from error
    numbers = re.findall(r"#define\s+UCP_API_(?:MAJOR|MINOR)\s+(\d+)", text)
    if len(numbers) != 2:
        raise UcxUnavailable(f"{header} does not define a version")
    return int(numbers[0]), int(numbers[1])


def program() -> Path:
    """Compiles the worker against the UCX found. Raises UcxUnavailable."""
    where = prefix()
    found = version(where)
    if found < NEEDED:
        raise UcxUnavailable(
            f"UCX {found[0]}.{found[1]} of {where} has no failover mode: the mode began with "
            f"{NEEDED[0]}.{NEEDED[1]}"
        )
    library = where / "lib"
    flags = (f"-I{where / 'include'}", f"-L{library}", "-lucp", "-lucs", f"-Wl,-rpath,{library}")
    try:
        return build("ucx.cc", os.environ.get("CXX") or find_tool("c++"), flags)
    except BuildError as error:
        raise UcxUnavailable(str(error)) from error


@contextmanager
def group(lab: Lab, worker: Path, scratch: Path, name: str, port: int) -> Iterator[WorkerGroup]:
    """Starts a worker on each node of a two-node lab.

    The workers exchange addresses over ``port`` of the management NIC. ``name`` is the name of the
    group's files, different for every group. Raises WorkerError when UCX does not start.
    """
    control, log = scratch / f"{name}.control", scratch / f"{name}.log"
    store = f"{lab.nodes[0].management_address}:{port}"
    processes = [
        WorkerCommand([str(worker), str(control), str(node.index), store], node.popen)
        for node in lab.nodes
    ]
    rails = {
        "UCX_NET_DEVICES": ",".join(f"rail{rail}" for rail in range(lab.rails)),
        "UCX_MAX_EAGER_RAILS": str(lab.rails),
    }
    launch = Launch(processes, {**ENVIRONMENT, **rails})
    with WorkerGroup("UCX", launch, len(lab.nodes), control, log) as workers:
        yield workers
