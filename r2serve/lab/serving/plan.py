"""Configuration of a server, for every engine."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from r2serve.lab.serving.places import LOOPBACK_RAILS

MAX_MODEL_LEN = 16384


class ServeError(RuntimeError):
    """The server failed to start or ended; the text contains the first error of the logs."""


@dataclass(frozen=True)
class Plan:
    """Configuration of a server.

    lab: True if the places are lab nodes with equal numbers of ranks; False for places on this
    machine, where each rank is a node. tensor_parallel, pipeline_parallel: their product is the
    number of ranks, a multiple of the number of places. settings: further environment variables.
    gpu: all ranks share a GPU and decode with captured graphs. engine: a key of ``ENGINES`` in
    serve.py. data_parallel: engines of vLLM, the same number on every place; more than 1 needs
    tensor_parallel and pipeline_parallel of one place. eager: without a compiler, on CPUs. job:
    number of the server among those of the same places, which have ports of their own.
    """

    label: str
    model: Path
    r2ccl: bool
    lab: bool
    work: Path
    max_requests: int
    tensor_parallel: int = 2
    pipeline_parallel: int = 1
    settings: Mapping[str, str] = field(default_factory=dict)
    gpu: bool = False
    engine: str = "vllm"
    data_parallel: int = 1
    eager: bool = True
    job: int = 0


def command(name: str) -> str:
    """Returns the path of an engine's command.

    Raises ServeError if the engine is not installed.
    """
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise ServeError(
            f"the command `{name}` is not installed (in a checkout of r2serve, run: pip install "
            f"'.[{name}]'; SGLang has its own environment: make setup-sglang)"
        )
    return found


def scratch(plan: Plan, index: int) -> Path:
    """Returns the folder for the temporary files of node `index`."""
    return plan.work / f"{plan.label}-node{index}"


def journal_directory(plan: Plan, index: int) -> Path:
    return scratch(plan, index) / "journal"


def fault_file(plan: Plan) -> Path:
    """Returns the path of the engine's fault file, used without a lab."""
    return plan.work / f"{plan.label}-faults"


def common_environment(plan: Plan, index: int) -> dict[str, str]:
    """Returns the variables of node `index` that every engine needs, with this process's own."""
    folder = scratch(plan, index)
    env = dict(os.environ)
    env.update(
        OMP_NUM_THREADS="1",
        OMP_WAIT_POLICY="passive",
        HF_HUB_OFFLINE="1",
        # Caches of the engine and of libraries are removed with the demo's directory.
        HF_HOME=str(folder / "hf"),
        TMPDIR=str(folder),
        TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"),
        TRITON_CACHE_DIR=str(folder / "triton"),
        XDG_CACHE_HOME=str(folder / "cache"),
    )
    if plan.lab:
        # With the stock communicator, gloo carries the data, so gloo uses a rail. With r2ccl, gloo
        # only carries the bootstrap, so gloo uses the management port.
        env["GLOO_SOCKET_IFNAME"] = "mgmt0" if plan.r2ccl else "rail0"
    else:
        env["GLOO_SOCKET_IFNAME"] = "lo"
    if plan.r2ccl:
        env["R2CCL_JOURNAL_DIR"] = str(journal_directory(plan, index))
        if plan.lab:
            # Faults of the management port are apart from faults of rails.
            env["R2CCL_MANAGEMENT"] = "mgmt0"
        else:
            env["R2CCL_NODE"] = "per-rank"
            env["R2CCL_RAILS"] = ",".join(LOOPBACK_RAILS)
            env["R2CCL_FAULT_FILE"] = str(fault_file(plan))
    return env
