"""Real `vllm serve` engines for the tests: started, queried, and always ended."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
from browsers import browser, chromium, page
from forked import Forked, Forks
from ports import free_port
from timely import TimingMiss, patience, timely

__all__ = ["browser", "chromium", "page"]

START_TIMEOUT_S = 300
STOP_TIMEOUT_S = 60
ANSWER_TIMEOUT_S = 300
PLACES = 2
"""Number of engines at the same time, of all pytest workers together."""
PLACE_TIMEOUT_S = 1000
VLLM = Path(sys.executable).with_name("vllm")

# Settings of vLLM's CPU build for a machine with few cores.
BASE_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass
class ServeNode:
    """A `vllm serve` process with its workers, and its log."""

    process: Forked | subprocess.Popen[bytes]
    log_file: Path

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def workers(self) -> list[psutil.Process]:
        """Returns the worker processes, by rank."""
        return sorted(
            (
                child
                for child in psutil.Process(self.process.pid).children(recursive=True)
                if "Worker" in "".join(child.cmdline()[:1])
            ),
            key=lambda child: child.cmdline()[0],
        )


@dataclass
class Engine:
    """A served model on one or more nodes; the first node answers requests."""

    model: Path
    port: int
    nodes: list[ServeNode] = field(default_factory=list)

    def wait_until_up(self) -> None:
        try:
            timely(self._is_up, "the engine is up", within_s=START_TIMEOUT_S, every_s=0.5)
        except TimingMiss as miss:
            raise TimingMiss(f"{miss}\n{self.nodes[0].log[-6000:]}") from None

    def _is_up(self) -> bool:
        for node in self.nodes:
            assert node.process.poll() is None, f"ended at start-up:\n{node.log[-6000:]}"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=60):
                return True
        except OSError:
            return False

    def running(self) -> int:
        """Returns the number of running requests."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as metrics:
            text = metrics.read().decode()
        found = re.search(r"^vllm:num_requests_running\{.*\} ([0-9.]+)$", text, re.MULTILINE)
        return int(float(found[1])) if found else 0

    def complete(self, prompt: str, tokens: int) -> tuple[int, str]:
        """Returns HTTP status and greedy text; after an error the text is the error's body."""
        status, answer = self._ask(prompt, tokens)
        return status, answer if isinstance(answer, str) else answer["text"]

    def logprobs(self, prompt: str) -> list[float]:
        """Returns the log probability of each prompt token after the first."""
        status, answer = self._ask(prompt, 1, echo=True, logprobs=0)
        assert status == 200, answer
        return [float(each) for each in answer["logprobs"]["token_logprobs"][1:-1]]

    def _ask(self, prompt: str, tokens: int, **more: Any) -> tuple[int, Any]:
        body: dict[str, Any] = {
            "model": str(self.model),
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            **more,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            limit_s = ANSWER_TIMEOUT_S * patience()
            with urllib.request.urlopen(request, timeout=limit_s) as response:
                return response.status, json.load(response)["choices"][0]
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def has_ended(self) -> bool:
        return all(node.process.poll() is not None for node in self.nodes)

    def stop(self) -> None:
        for node in self.nodes:
            _signal_group(node.process, signal.SIGTERM)
        for number, node in enumerate(self.nodes):
            _end_group(node.process, f"node {number} of the engine at port {self.port}")


def _signal_group(process: Forked | subprocess.Popen[bytes], number: int) -> bool:
    """Sends a signal to the process group of a node; returns False if the group is empty."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
        return True
    return False


def _end_group(process: Forked | subprocess.Popen[bytes], what: str) -> None:
    """Waits until the group is empty, helpers for shared memory included; kills a late group.

    A late group is a warning and no error, because the verdict of the test is known already.
    """

    def is_empty() -> bool:
        # Reaps the process: a zombie would still be a member of the group. The parent of forks may
        # have ended, and its forks with it.
        with contextlib.suppress(OSError, RuntimeError):
            process.poll()
        return not _signal_group(process, 0)

    for last_resort in (False, True):
        try:
            timely(is_empty, f"the end of {what}", within_s=STOP_TIMEOUT_S, every_s=0.1)
            return
        except TimingMiss as miss:
            done = "given up" if last_resort else "killed"
            warnings.warn(f"process group {process.pid} is {done}: {miss}", stacklevel=2)
            _signal_group(process, signal.SIGKILL)


@pytest.fixture
def sidecar_port() -> int:
    return free_port()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # imported here, because some GPU machines lack its requirements
    from r2serve.lab.serving.model import (
        TinyLlama,
        make_tiny_llama,
    )

    # Two layers cover every position: after the first layer, between two, after the last layer.
    shape = TinyLlama(layers=2)
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny-llama", shape)


StartEngine = Callable[..., Engine]


start_process = partial(subprocess.Popen, start_new_session=True)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all pytest workers of this run."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


def is_locked_now(file: IO[str]) -> bool:
    """Locks a file, unless another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def a_place(folder: Path) -> Iterator[None]:
    """Waits for one of the PLACES, and keeps the place.

    Each holder has a single place, and waits for nothing that another holder has. The kernel frees
    the place of a process that dies.
    """
    with contextlib.ExitStack() as opened:
        files = [
            opened.enter_context((folder / f"engines-{number}.lock").open("w"))
            for number in range(PLACES)
        ]
        timely(
            lambda: any(map(is_locked_now, files)),
            f"fewer than {PLACES} engines of other tests",
            within_s=PLACE_TIMEOUT_S,
            every_s=0.2,
        )
        yield


@contextlib.contextmanager
def engines(model: Path, folder: Path, forks: Forks, places: Path) -> Iterator[StartEngine]:
    """Yields a function that starts an engine and waits for /health; ends all engines at exit.

    places: folder of the locks, see :func:`a_place`. A test starts an engine after the end of the
    engine before, so that a place suffices. replicas: each node has a data-parallel engine, and no
    group of tensor parallelism spans nodes.
    """
    started: list[Engine] = []

    def start(
        tensor_parallel: int,
        flags: list[str],
        nodes: list[dict[str, str]],
        *,
        eager: bool = True,
        replicas: bool = False,
    ) -> Engine:
        # A compiling engine is no fork, because the compiler reads the environment at import.
        popen = partial(forks.popen, session=True) if eager else start_process
        around = forks.environment if eager else {}
        alive = [each for each in started if not each.has_ended()]
        assert not alive, "a test has a place for a single engine"
        engine = Engine(model, free_port())
        started.append(engine)
        master_port = str(free_port())
        for rank, extra in enumerate(nodes):
            command: list[str | Path] = [VLLM, "serve", model]
            command += ["--enforce-eager"] if eager else []
            command += ["--tensor-parallel-size", str(tensor_parallel), "--max-model-len", "512"]
            command += ["--port", str(engine.port), "--max-num-seqs", "8", *flags]
            if replicas:
                command += ["--data-parallel-size", str(len(nodes))]
                command += ["--data-parallel-size-local", "1"]
                command += ["--data-parallel-address", "127.0.0.1"]
                command += ["--data-parallel-rpc-port", master_port]
                command += ["--data-parallel-start-rank", str(rank)] if rank else []
            elif len(nodes) > 1:
                command += ["--nnodes", str(len(nodes)), "--node-rank", str(rank)]
                command += ["--master-addr", "127.0.0.1", "--master-port", master_port]
            if rank:
                command += ["--headless"]
            log_file = folder / f"engine{len(started)}-node{rank}.log"
            with log_file.open("wb") as log:
                process = popen(
                    [sys.executable, *map(str, command)],
                    env={**os.environ, **around, **BASE_ENVIRONMENT, **extra},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            engine.nodes.append(ServeNode(process, log_file))
        engine.wait_until_up()
        return engine

    with a_place(places):
        try:
            yield start
        finally:
            for engine in started:
                engine.stop()


@pytest.fixture
def start_engine(
    tiny_llama: Path, tmp_path: Path, vllm_forks: Forks, shared_folder: Path
) -> Iterator[StartEngine]:
    """Starts an engine and waits until it is up.

    Usage: `start_engine(tp, flags, [environment of each node])`.
    """
    with engines(tiny_llama, tmp_path, vllm_forks, shared_folder) as start:
        yield start


@pytest.fixture
def start_moe(tmp_path: Path, vllm_forks: Forks, shared_folder: Path) -> Iterator[StartEngine]:
    """Starts an engine of a model with experts; see :func:`start_engine`."""
    from tiny_moe import make_tiny_moe

    model = make_tiny_moe(tmp_path / "tiny-moe")
    with engines(model, tmp_path, vllm_forks, shared_folder) as start:
        yield start


@dataclass(frozen=True)
class Answers:
    """Answers of an engine.

    texts: the greedy text of each prompt. logprobs: the log probabilities of the tokens of each
    prompt and text. log: the log of the engine's first node.
    """

    texts: list[str]
    logprobs: list[list[float]]
    log: str


@pytest.fixture(scope="session")
def eager_answers(
    tiny_llama: Path,
    tmp_path_factory: pytest.TempPathFactory,
    vllm_forks: Forks,
    shared_folder: Path,
) -> Answers:
    """Answers of an eager r2ccl engine with 2 ranks on 2 nodes, shared by all pytest workers.

    The fixtures of a session come before those of a test, so the first test that waits here has no
    place for an engine of its own.
    """
    from answers import FLAG, PROMPTS, RAILS, greedy

    kept = shared_folder / "eager-answers.json"
    folder = tmp_path_factory.mktemp("eager")
    with (shared_folder / "eager-answers.lock").open("w") as lock:
        timely(
            lambda: is_locked_now(lock),
            "the answers of another pytest worker",
            within_s=PLACE_TIMEOUT_S,
            every_s=0.2,
        )
        if not kept.exists():
            with engines(tiny_llama, folder, vllm_forks, shared_folder) as start:
                engine = start(2, FLAG, [RAILS | {"R2CCL_NODE": "per-rank"}])
                texts = greedy(engine)
                said = [engine.logprobs(p + t) for p, t in zip(PROMPTS, texts, strict=True)]
                answers = {"texts": texts, "logprobs": said, "log": engine.nodes[0].log}
            kept.write_text(json.dumps(answers), encoding="utf-8")
    return Answers(**json.loads(kept.read_text(encoding="utf-8")))
