"""Starts `vllm serve` over the demo's nodes, waits until it answers, and takes it down again."""

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

# Half a minute on an idle machine of two cores; this is for a busy one.
START_TIMEOUT_S = 240.0
MAX_MODEL_LEN = 16384
# The longest that we wait for a run or a token; the engine itself would give up after 300 s.
RUN_TIMEOUT_S = 150.0
# Tokens of the single stream whose rate is the length of a decode step. One stream, because with
# many the client and the API server take their share of the few cores from the workers.
STEP_TOKENS = 200
# In a lab each node has its own network, so fixed ports are free by construction.
LAB_API_PORT, LAB_MASTER_PORT = 8000, 29500

# Of the memory of a GPU that two ranks share.
GPU_SHARE = "0.3"

# The closing line of a traceback, with or without the engine's own prefix.
_ERROR_LINE = re.compile(r"^(?:.*\] )?([\w.]*(?:Error|Exception): .*)$", re.MULTILINE)


class ServeError(RuntimeError):
    """The server did not come up or ended; the text has the end of its log."""


@dataclass(frozen=True)
class Plan:
    """What to serve and how.

    lab: the places are nodes of a lab, with as many ranks each; otherwise they are on this machine,
    and each rank is a node. tensor_parallel: ranks, a multiple of the places. settings: further
    environment variables. gpu: all ranks share one, and decode by captured graphs.
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
    """Environment of the processes of node index."""
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
        # Everything that engine and libraries leave behind goes with the demo's directory.
        HF_HOME=str(scratch / "hf"),
        TMPDIR=str(scratch),
        TORCHINDUCTOR_CACHE_DIR=str(scratch / "inductor"),
        TRITON_CACHE_DIR=str(scratch / "triton"),
        VLLM_CACHE_ROOT=str(scratch / "vllm-cache"),
        VLLM_CONFIG_ROOT=str(scratch / "vllm-config"),
        XDG_CACHE_HOME=str(scratch / "cache"),
    )
    if plan.lab:
        # Stock: gloo's own traffic is the data path, so it goes over a rail. With r2ccl only the
        # bootstrap is left to gloo, which belongs on the management port.
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
    """File through which faults reach the engine where there is no lab."""
    return plan.work / f"{plan.label}-faults"


def arguments(
    plan: Plan, places: Sequence[Place], index: int, host: str, port: int, master_port: int
) -> list[str]:
    argv = [vllm_command(), "serve", str(plan.model), "--served-model-name", "tiny-llama"]
    argv += ["--tensor-parallel-size", str(plan.tensor_parallel)]
    argv += ["--dtype", "float32"]
    argv += ["--gpu-memory-utilization", GPU_SHARE] if plan.gpu else ["--enforce-eager"]
    argv += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(plan.max_requests)]
    # A prompt served from the cache has another first step than one that is computed.
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
    """A running server as a context manager; leaving it kills every process of every place.

    client: where requests come from, and which is left alone; None: the node that answers them.
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
        """Directories with the journals of the workers, one a node."""
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
        """Returns when the API answers; calls watch(seconds so far) now and then.

        Raises ServeError when a node's process ends or START_TIMEOUT_S passes.
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
        """One undisturbed run of all texts; tokens: of each, or one a text; label: names its file.

        Raises LoadError when it does not end within RUN_TIMEOUT_S, ServeError when a node ends.
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
        return first_error(logs) or "the logs name no error (see --keep-logs)"


@contextlib.contextmanager
def warm_server(
    plan: Plan,
    places: Sequence[Place],
    what: str,
    texts: Sequence[str],
    tokens: tuple[int, int],
    progress: Progress,
) -> Iterator[tuple[Server, Run]]:
    """A server that has answered all texts twice, and the second of these runs.

    The first requests compile kernels; only the second ones tell the speed.

    what: is started, for people. tokens: of each request, in the first and the second run.
    Raises ServeError, LoadError: as :class:`Server`.
    """
    with Server(plan, places) as server:
        with progress.step(f"starting {what}"):
            server.wait_until_ready(lambda seconds: progress.detail(f"{seconds:.0f} s"))
        with progress.step("warming up"):
            server.stream(texts, tokens[0], "warm-up-first", progress.detail)
            warm = server.stream(texts, tokens[1], "warm-up", progress.detail)
        yield server, warm


def first_error(logs: Sequence[str]) -> str | None:
    """What the first error of each log was; what follows it is about processes that it ended."""
    found = []
    for index, log in enumerate(logs):
        match = _ERROR_LINE.search(log)
        if match is not None:
            found.append(f"node {index}: {match[1]}")
    return "; ".join(found) or None
