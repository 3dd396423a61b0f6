"""UCX's failover mode as a peer: one endpoint with TCP lanes on both rails of a lab.

UCX has the mode since 1.22; the wheels libucx-cu12 and libucx-cu13 bring that. Each fault gets new
workers, because an endpoint that has lost a message never works again.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from r2serve.bench.collectives.contenders import Launch, Process
from r2serve.bench.collectives.control import WorkerGroup
from r2serve.bench.collectives.native.build import BuildError, build, find_tool
from r2serve.lab.lab import Lab

UCX_VARIABLE = "R2SERVE_BENCH_UCX"
NEEDED = (1, 22)

ENVIRONMENT = {
    "UCX_TLS": "tcp",
    # Of what failover sends again, the one protocol for TCP: eager, without a copy, on all rails.
    "UCX_RNDV_THRESH": "inf",
    "UCX_ZCOPY_THRESH": "0",
    # How soon a lane that is silent fails: the kernel's own patience is a quarter of an hour.
    "UCX_TCP_USER_TIMEOUT": "100ms",
    "UCX_KEEPALIVE_INTERVAL": "100ms",
}


class UcxUnavailable(RuntimeError):
    """There is no UCX with a failover mode here; says why."""


def prefix() -> Path:
    """Where UCX is: what the variable says, else in its wheel. Raises UcxUnavailable."""
    given = os.environ.get(UCX_VARIABLE)
    if given:
        return Path(given)
    wheel = importlib.util.find_spec("libucx")
    if wheel is None or wheel.origin is None:
        raise UcxUnavailable(
            f"no UCX; `pip install 'libucx-cu12>=1.22'` brings one, {UCX_VARIABLE} says where "
            "else it is"
        )
    return Path(wheel.origin).parent


def version(where: Path) -> tuple[int, int]:
    """Of the headers below ``where``. Raises UcxUnavailable."""
    header = where / "include" / "ucp" / "api" / "ucp_version.h"
    try:
        text = header.read_text(encoding="utf-8")
    except OSError as error:
        raise UcxUnavailable(f"{where} has no UCX: {error}") from error
    numbers = re.findall(r"#define\s+UCP_API_(?:MAJOR|MINOR)\s+(\d+)", text)
    if len(numbers) != 2:
        raise UcxUnavailable(f"{header} does not say its version")
    return int(numbers[0]), int(numbers[1])


def program() -> Path:
    """The worker, compiled against that UCX. Raises UcxUnavailable."""
    where = prefix()
    found = version(where)
    if found < NEEDED:
        raise UcxUnavailable(
            f"UCX {found[0]}.{found[1]} of {where} has no failover mode, which began with "
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
    """A worker in each node of a lab of two, which meet at ``port`` of the management NIC.

    ``name`` is of their files, another one for every group. Raises WorkerError when UCX does not
    start.
    """
    control, log = scratch / f"{name}.control", scratch / f"{name}.log"
    store = f"{lab.nodes[0].management_address}:{port}"
    processes = [
        Process([str(worker), str(control), str(node.index), store], node.popen)
        for node in lab.nodes
    ]
    rails = {
        "UCX_NET_DEVICES": ",".join(f"rail{rail}" for rail in range(lab.rails)),
        "UCX_MAX_EAGER_RAILS": str(lab.rails),
    }
    launch = Launch(processes, {**ENVIRONMENT, **rails})
    with WorkerGroup("UCX", launch, len(lab.nodes), control, log) as workers:
        yield workers
