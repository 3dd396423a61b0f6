"""Fixtures that start the ranks of a job as processes, exchange messages, and end all processes."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
from browsers import browser, chromium, page
from forked import Forked, Forks
from ports import free_port
from timely import TimingMiss, ended, patience, stop, timely

from r2serve.lab.holder import LabUnavailableError
from r2serve.lab.lab import Lab
from r2serve.lab.nodes import Node

__all__ = ["browser", "chromium", "page"]

WORKERS = Path(__file__).parent / "workers"
LOOPBACK_RAILS = "127.0.0.1,127.0.0.2"
_ENDED = object()

Popen = Callable[..., Forked]


class Rank:
    """A process of a job.

    Test and process exchange lines of JSON. The standard error of the process goes to a file.
    """

    def __init__(
        self,
        number: int,
        script: str,
        arguments: Mapping[str, Any],
        env: Mapping[str, str],
        log: Path,
        popen: Popen,
    ) -> None:
        self.number = number
        self.log = log
        command = [sys.executable, str(WORKERS / script), json.dumps(dict(arguments))]
        with log.open("wb") as errors:
            self.process = popen(
                command,
                env=dict(env),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self._lines: queue.Queue[Any] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))
        self._lines.put(_ENDED)

    def say(self, what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self, timeout_s: float) -> Any:
        """Returns the next message of the process; `timeout_s` is multiplied by `patience`."""
        limit_s = timeout_s * patience()
        try:
            said = self._lines.get(timeout=limit_s)
        except queue.Empty:
            raise TimingMiss(self._about(f"sent no message for {limit_s:g} s")) from None
        if said is _ENDED:
            self.fail("ended before the expected message")
        return said

    def ask(self, what: Any, timeout_s: float = 60.0) -> Any:
        self.say(what)
        return self.hear(timeout_s)

    def fail(self, what: str) -> NoReturn:
        pytest.fail(self._about(what))

    def _about(self, what: str) -> str:
        text = self.log.read_text(errors="replace")[-4000:]
        return f"rank {self.number} {what}; its standard error ends with:\n{text}"

    def wait(self, timeout_s: float) -> None:
        """Waits for the end of the process with status 0; see :func:`timely.ended`."""
        try:
            status = ended(self.process, f"rank {self.number}", timeout_s)
        except TimingMiss as miss:
            raise TimingMiss(self._about(str(miss))) from None
        if status != 0:
            self.fail(f"ended with status {status}")

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        stop(self.process, f"rank {self.number}")
        self._reader.join(10)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue  # buffered messages are no longer needed

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


class Jobs:
    """Starts jobs; the end of the test ends all remaining processes."""

    def __init__(
        self, folder: Path, forks: Forks, say: Callable[[str], None] | None = None
    ) -> None:
        """say: prints a line about the machines of a case; None: the run does not print them."""
        self.say = say
        self._folder = folder
        self._forks = forks
        self._ranks: list[Rank] = []
        self._count = 0

    def start(
        self,
        script: str,
        ranks: int,
        *,
        config: Mapping[str, Any] | None = None,
        per_rank: Callable[[int], Mapping[str, Any]] | None = None,
        nodes: Sequence[Node] = (),
        host: str = "127.0.0.1",
        **arguments: Any,
    ) -> list[Rank]:
        """Starts a script of the folder `workers`, in a process for each rank.

        config: options of r2ccl, set as environment variables. per_rank: further options by rank.
        nodes: nodes of a lab, a node for each rank.
        """
        self._count += 1
        shared = {"ranks": ranks, "host": host, "port": free_port(), **arguments}
        started = []
        for number in range(ranks):
            options: dict[str, Any] = {"rails": LOOPBACK_RAILS, "node": "per-rank"}
            options |= {"connect_timeout_s": 60, **(config or {})}
            options |= per_rank(number) if per_rank else {}
            env = {k: v for k, v in os.environ.items() if not k.startswith("R2CCL_")}
            env |= {"R2CCL_" + name.upper(): str(value) for name, value in options.items()}
            # A single OpenMP thread per rank: the ranks of a test share few cores.
            env |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
            log = self._folder / f"job{self._count}-rank{number}.log"
            started.append(
                Rank(
                    number,
                    script,
                    {**shared, "rank": number},
                    env,
                    log,
                    partial(self._forks.popen, node=nodes[number].namespaces if nodes else None),
                )
            )
            self._ranks.append(started[-1])
        return started

    def end(self) -> None:
        for rank in self._ranks:
            rank.kill()


@pytest.fixture
def jobs(
    request: pytest.FixtureRequest, tmp_path: Path, forks: Forks, show: Callable[[str], None]
) -> Iterator[Jobs]:
    shown = request.config.getoption("--machines") and request.node.get_closest_marker("case")
    made = Jobs(tmp_path, forks, show if shown else None)
    yield made
    made.end()


@pytest.fixture
def free_ports() -> Callable[[int], list[int]]:
    """Returns a function for a number of different free ports."""

    def find(count: int) -> list[int]:
        ports: set[int] = set()
        while len(ports) < count:
            ports.add(free_port())
        return list(ports)

    return find


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Returns a function that waits for a condition; see :func:`timely.timely`."""

    def wait(what: str, condition: Callable[[], bool], patience_s: float = 30.0) -> None:
        timely(condition, what, patience_s)

    return wait


@pytest.fixture(scope="module", params=[False, True], ids=["root", "user-namespace"])
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    if not request.param and os.geteuid() != 0:
        pytest.skip("needs root")
    try:
        with Lab(nodes=2, rails=2, user_namespace=request.param) as built:
            yield built
    except LabUnavailableError as error:
        pytest.skip(f"no lab on this machine: {error}")


@pytest.fixture
def make_lab() -> Iterator[Callable[..., Lab]]:
    """Returns a function that builds labs; the labs end with the test."""
    with ExitStack() as stack:

        def make(rails: int, nodes: int = 2) -> Lab:
            try:
                return stack.enter_context(Lab(nodes=nodes, rails=rails))
            except LabUnavailableError as error:
                pytest.skip(f"no lab on this machine: {error}")

        yield make
