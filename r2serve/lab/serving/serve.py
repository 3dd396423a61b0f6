"""Starts an engine on the demo's nodes, waits for readiness, and stops all processes."""

from __future__ import annotations

import contextlib
import logging
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

from r2serve.lab.serving import sglang, vllm
from r2serve.lab.serving.client import Load, LoadError, Run, wait_until_healthy
from r2serve.lab.serving.places import LocalPlace, Place, free_port
from r2serve.lab.serving.plan import (
    Plan,
    ServeError,
    common_environment,
    fault_file,
    journal_directory,
)
from r2serve.lab.serving.progress import Progress

logger = logging.getLogger(__name__)

# Longest wait for a run or a token; the engine's own timeout is 300 s.
RUN_TIMEOUT_S = 150.0
# Tokens of the run to measure the decode step. A single stream, because with many streams the
# client and the API server would take CPU time from the workers.
STEP_TOKENS = 200
# Fixed ports are always free in a lab: each node has a private network namespace.
LAB_API_PORT, LAB_MASTER_PORT = 8000, 29500
# Distance of the ports of two servers of the same nodes.
PORTS_OF_A_JOB = 100
# A compiler takes minutes on a machine with few cores.
COMPILING = 3

# Last line of a traceback, with or without the engine's log prefix.
_ERROR_LINE = re.compile(r"^(?:.*\] )?([\w.]*(?:Error|Exception): .*)$", re.MULTILINE)


class Engine(Protocol):
    """The part of an engine's module used here."""

    START_TIMEOUT_S: float

    def environment(self, plan: Plan, place: Place, index: int) -> dict[str, str]: ...

    def arguments(
        self,
        plan: Plan,
        places: Sequence[Place],
        index: int,
        host: str,
        port: int,
        master_port: int,
    ) -> list[str]: ...


ENGINES: dict[str, Engine] = {"vllm": vllm, "sglang": sglang}
"""Engines by the name of their command."""


def environment(plan: Plan, place: Place, index: int) -> dict[str, str]:
    """Returns the environment for the processes of node `index`."""
    own = ENGINES[plan.engine].environment(plan, place, index)
    return common_environment(plan, index) | own | dict(plan.settings)


class Server:
    """A running server as a context manager; leaving kills every process of every place.

    client: place of the load, not killed on leaving; None = the node with the API server.
    """

    def __init__(self, plan: Plan, places: Sequence[Place], client: Place | None = None) -> None:
        self.plan = plan
        self.client = client or places[0]
        self._places = places
        self._processes: list[subprocess.Popen[bytes]] = []
        local = isinstance(places[0], LocalPlace)
        beyond = plan.job * PORTS_OF_A_JOB
        self.port = free_port("127.0.0.1") if local else LAB_API_PORT + beyond
        self._master_port = free_port("127.0.0.1") if local else LAB_MASTER_PORT + beyond
        self._host = "127.0.0.1" if client is None else places[0].address
        self.url = f"http://{self._host}:{self.port}"

    def log_path(self, index: int) -> Path:
        return self.plan.work / f"{self.plan.label}-node{index}.log"

    def journals(self) -> list[Path]:
        """Returns the journal directory of each node."""
        return [journal_directory(self.plan, index) for index in range(len(self._places))]

    def __enter__(self) -> Server:
        try:
            for index, place in enumerate(self._places):
                self._start(index, place)
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._kill()

    def _kill(self) -> None:
        for place in self._places:
            place.kill_all()

    def _start(self, index: int, place: Place) -> None:
        journal_directory(self.plan, index).mkdir(parents=True, exist_ok=True)
        if self.plan.r2ccl and not self.plan.lab:
            fault_file(self.plan).touch(mode=0o600)  # as R2CCL_FAULT_FILE must be
        engine = ENGINES[self.plan.engine]
        argv = engine.arguments(
            self.plan, self._places, index, self._host, self.port, self._master_port
        )
        logger.debug("node %d: %s", index, " ".join(argv))
        with self.log_path(index).open("wb") as log:
            self._processes.append(
                place.popen(
                    argv,
                    env=environment(self.plan, place, index),
                    cwd=self.plan.work,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )

    def wait_until_ready(self, watch: Callable[[float], None]) -> None:
        """Waits until the API answers; calls `watch` with the elapsed seconds every 0.2 s.

        Raises ServeError if a node's process ends, or after the engine's START_TIMEOUT_S.
        """
        started = time.monotonic()
        limit_s = ENGINES[self.plan.engine].START_TIMEOUT_S * (1 if self.plan.eager else COMPILING)
        waiter = wait_until_healthy(self.client, self.url, limit_s)
        while waiter.poll() is None:
            self.check_alive()
            watch(time.monotonic() - started)
            time.sleep(0.2)
        if waiter.returncode != 0:
            raise ServeError(f"no answer within {limit_s:.0f} s: {self._what_the_logs_say()}")

    def stream(
        self,
        texts: Sequence[str],
        tokens: int | Sequence[int],
        label: str,
        watch: Callable[[str], None],
    ) -> Run:
        """Runs all texts without faults and returns the result.

        tokens: per request, or a value per text. label: name of the result file. Raises LoadError
        after RUN_TIMEOUT_S, ServeError if a node's process ends.
        """
        path = self.plan.work / f"{self.plan.label}-{label}.json"
        load = Load(self.client, self.url, texts, tokens, path)
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while load.running:
            self.check_alive()
            so_far = f"{load.tokens} of {load.expected_tokens} tokens"
            watch(so_far)
            if time.monotonic() > deadline:
                raise LoadError(f"{label}: only {so_far} after {RUN_TIMEOUT_S:.0f} s")
            time.sleep(0.1)
        return load.result(timeout_s=5)

    def check_alive(self) -> None:
        for index, process in enumerate(self._processes):
            if process.poll() is not None:
                raise ServeError(
                    f"{self.plan.engine} serve on node {index} ended with status "
                    f"{process.returncode}: "
                    f"{self._what_the_logs_say()}"
                )

    def _what_the_logs_say(self) -> str:
        logs = [
            self.log_path(index).read_text(encoding="utf-8", errors="replace")
            for index in range(len(self._processes))
        ]
        return first_error(logs) or "no error in the logs (use --keep-logs to keep the logs)"


@contextlib.contextmanager
def warm_server(
    plan: Plan,
    places: Sequence[Place],
    what: str,
    texts: Sequence[str],
    tokens: tuple[int, int],
    progress: Progress,
) -> Iterator[tuple[Server, Run]]:
    """Yields a warmed-up server, and the second of two warm-up runs of all texts.

    The first run compiles kernels; the second run shows the speed.

    what: display name of the server. tokens: per request, for the first and the second run.
    Raises ServeError and LoadError like :class:`Server`.
    """
    with Server(plan, places) as server:
        with progress.step(f"starting {what}"):
            server.wait_until_ready(lambda seconds: progress.detail(f"{seconds:.0f} s"))
        with progress.step("warming up"):
            server.stream(texts, tokens[0], "warm-up-first", progress.detail)
            warm = server.stream(texts, tokens[1], "warm-up", progress.detail)
        yield server, warm


def first_error(logs: Sequence[str]) -> str | None:
    """Returns the first error of each log, usually the root cause; None without errors."""
    found = []
    for index, log in enumerate(logs):
        match = _ERROR_LINE.search(log)
        if match is not None:
            found.append(f"node {index}: {match[1]}")
    return "; ".join(found) or None
