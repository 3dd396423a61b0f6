"""Command line and environment of `vllm serve`."""

from __future__ import annotations

from collections.abc import Sequence

from r2serve.lab.serving.places import Place
from r2serve.lab.serving.plan import MAX_MODEL_LEN, Plan, command, scratch

START_TIMEOUT_S = 240.0
"""A start takes about 30 s on an idle machine with two cores, and longer on a busy machine."""

GPU_SHARE = "0.3"
"""Fraction of GPU memory per rank; two ranks share the GPU."""


def environment(plan: Plan, place: Place, index: int) -> dict[str, str]:
    """Returns vLLM's own variables for the processes of node `index`."""
    folder = scratch(plan, index)
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": place.address,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(folder / "vllm-cache"),
        "VLLM_CONFIG_ROOT": str(folder / "vllm-config"),
    }


def arguments(
    plan: Plan, places: Sequence[Place], index: int, host: str, port: int, master_port: int
) -> list[str]:
    """Returns the command line of node `index`."""
    argv = [command("vllm"), "serve", str(plan.model), "--served-model-name", "tiny-llama"]
    argv += ["--tensor-parallel-size", str(plan.tensor_parallel)]
    argv += ["--pipeline-parallel-size", str(plan.pipeline_parallel)]
    argv += ["--dtype", "float32"]
    argv += ["--gpu-memory-utilization", GPU_SHARE] if plan.gpu else []
    argv += ["--enforce-eager"] if plan.eager and not plan.gpu else []
    argv += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(plan.max_requests)]
    # Prefix caching would change the first step of repeated prompts.
    argv += ["--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
    argv += ["--host", host, "--port", str(port)]
    if plan.r2ccl:
        argv += ["--distributed-backend", "r2ccl"]
    if plan.data_parallel > 1:
        argv += _data_parallel(plan, places, index, master_port)
    elif len(places) > 1:
        argv += ["--nnodes", str(len(places)), "--node-rank", str(index)]
        argv += ["--master-addr", places[0].address, "--master-port", str(master_port)]
        argv += ["--headless"] if index else []
    return argv


def _data_parallel(plan: Plan, places: Sequence[Place], index: int, rpc_port: int) -> list[str]:
    """Returns the options of engines that run side by side, some on each place."""
    here = plan.data_parallel // len(places)
    argv = ["--data-parallel-size", str(plan.data_parallel)]
    argv += ["--data-parallel-size-local", str(here)]
    argv += ["--data-parallel-address", places[0].address]
    argv += ["--data-parallel-rpc-port", str(rpc_port)]
    if index:
        argv += ["--headless", "--data-parallel-start-rank", str(index * here)]
    return argv
