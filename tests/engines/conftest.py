"""Real `vllm serve` engines for the tests: started, asked and, whatever happens, ended."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from forked import Forked, Forks

START_TIMEOUT_S = 300
STOP_TIMEOUT_S = 30
VLLM = Path(sys.executable).with_name("vllm")

# What the CPU build of vLLM needs to serve well on a machine with few cores.
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Node:
    """One `vllm serve` process, its workers included, and what it wrote."""

    process: Forked | subprocess.Popen[bytes]
    log_file: Path

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def workers(self) -> list[psutil.Process]:
        """Its worker processes, by rank."""
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
    """A served model: one node or more, the first of which answers."""

    model: Path
    port: int
    nodes: list[Node] = field(default_factory=list)

    def wait_until_up(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            for node in self.nodes:
                assert node.process.poll() is None, f"ended at start-up:\n{node.log[-6000:]}"
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.5)
        pytest.fail(f"not up within {START_TIMEOUT_S} s:\n{self.nodes[0].log[-6000:]}")

    def complete(self, prompt: str, tokens: int) -> tuple[int, str]:
        """Greedy text, with the HTTP status: 200, or what the engine's end gives."""
        status, answer = self._ask(prompt, tokens)
        return status, answer if isinstance(answer, str) else answer["text"]

    def logprobs(self, prompt: str) -> list[float]:
        """Of each token of the prompt but the first, after those before it."""
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
            with urllib.request.urlopen(request, timeout=120) as response:
                return response.status, json.load(response)["choices"][0]
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def stop(self) -> None:
        for node in self.nodes:
            _signal_group(node.process, signal.SIGTERM)
        for node in self.nodes:
            _end_group(node.process)


def _signal_group(process: subprocess.Popen[bytes], number: int) -> bool:
    """To the process and its workers: each node leads a process group. False if none is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
        return True
    return False


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Wait until all are gone, also the helpers that remove shared memory; then kill the rest."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while time.monotonic() < deadline:
        process.poll()  # reaps it: a zombie still counts as a member of its group
        if not _signal_group(process, 0):
            return
        time.sleep(0.1)
    _signal_group(process, signal.SIGKILL)
    process.wait(timeout=STOP_TIMEOUT_S)


@pytest.fixture
def sidecar_port() -> int:
    return free_port()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from r2serve.lab.serving.model import (  # what it needs is not on every GPU's machine
        TinyLlama,
        make_tiny_llama,
    )

    # Two layers have one of everything: after the first, between two, after the last.
    shape = TinyLlama(layers=2)
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny-llama", shape)


StartEngine = Callable[..., Engine]


start_process = partial(subprocess.Popen, start_new_session=True)


@contextlib.contextmanager
def engines(model: Path, folder: Path, forks: Forks) -> Iterator[StartEngine]:
    """Gives what starts an engine and waits until it is up; ends all of them in the end."""
    started: list[Engine] = []

    def start(
        tensor_parallel: int, flags: list[str], nodes: list[dict[str, str]], *, eager: bool = True
    ) -> Engine:
        # What compiles reads the environment when it is imported.
        popen = partial(forks.popen, session=True) if eager else start_process
        around = forks.environment if eager else {}
        engine = Engine(model, free_port())
        started.append(engine)
        master_port = str(free_port())
        for rank, extra in enumerate(nodes):
            command: list[str | Path] = [VLLM, "serve", model]
            command += ["--enforce-eager"] if eager else []
            command += ["--tensor-parallel-size", str(tensor_parallel), "--max-model-len", "512"]
            command += ["--port", str(engine.port), "--max-num-seqs", "8", *flags]
            if len(nodes) > 1:
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
            engine.nodes.append(Node(process, log_file))
        engine.wait_until_up()
        return engine

    try:
        yield start
    finally:
        for engine in started:
            engine.stop()


@pytest.fixture
def start_engine(tiny_llama: Path, tmp_path: Path, vllm_forks: Forks) -> Iterator[StartEngine]:
    """Start an engine, wait until it is up: ``start_engine(tp, flags, [environment, a node])``."""
    with engines(tiny_llama, tmp_path, vllm_forks) as start:
        yield start


@dataclass(frozen=True)
class Answers:
    """What an engine has said.

    texts: of each prompt, its greedy text. logprobs: of each prompt and text, those of its tokens.
    log: of the engine's first node.
    """

    texts: list[str]
    logprobs: list[list[float]]
    log: str


@pytest.fixture(scope="session")
def eager_answers(
    tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory, vllm_forks: Forks
) -> Answers:
    """Answers of one eager engine over r2ccl with two ranks on two nodes, for all workers."""
    from answers import FLAG, PROMPTS, RAILS, greedy

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    kept = folder / "eager-answers.json"
    with (folder / "eager-answers.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            with engines(tiny_llama, tmp_path_factory.mktemp("eager"), vllm_forks) as start:
                engine = start(2, FLAG, [RAILS | {"R2CCL_NODE": "per-rank"}])
                texts = greedy(engine)
                said = [engine.logprobs(p + t) for p, t in zip(PROMPTS, texts, strict=True)]
                answers = {"texts": texts, "logprobs": said, "log": engine.nodes[0].log}
            kept.write_text(json.dumps(answers), encoding="utf-8")
    return Answers(**json.loads(kept.read_text(encoding="utf-8")))
