"""Command line and environment of `sglang serve` on CPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence

from r2serve.lab.serving.places import Place
from r2serve.lab.serving.plan import MAX_MODEL_LEN, Plan, ServeError, command

START_TIMEOUT_S = 600.0
"""Each of three processes a node imports for 20 s of CPU time."""

PLACES_OF_TOKENS = 131072
"""Size of the KV cache in tokens; by default SGLang takes most of the memory."""


def environment(plan: Plan, place: Place, index: int) -> dict[str, str]:
    """Returns SGLang's own variables for the processes of node `index`."""
    every_cpu = f"0-{(os.cpu_count() or 1) - 1}"
    ranks = plan.tensor_parallel * plan.pipeline_parallel
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        # An entry for each rank; SGLang otherwise wants a NUMA node for each rank.
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join([every_cpu] * ranks),
        "SGLANG_HOST_IP": place.address,
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": "0",
    }


def arguments(
    plan: Plan, places: Sequence[Place], index: int, host: str, port: int, master_port: int
) -> list[str]:
    """Returns the command line of node `index`.

    Raises ServeError for a plan with GPUs.
    """
    if plan.gpu:
        raise ServeError("SGLang on a GPU: not supported here; must be run without --gpu")
    argv = [command("sglang"), "serve", str(plan.model), "--served-model-name", "tiny-llama"]
    argv += ["--tensor-parallel-size", str(plan.tensor_parallel)]
    argv += ["--pipeline-parallel-size", str(plan.pipeline_parallel), "--dtype", "float32"]
    argv += ["--device", "cpu", "--attention-backend", "torch_native", "--random-seed", "1"]
    argv += ["--context-length", str(MAX_MODEL_LEN)]
    argv += ["--max-running-requests", str(max(plan.max_requests, 2))]
    argv += ["--max-total-tokens", str(PLACES_OF_TOKENS), "--mem-fraction-static", "0.2"]
    # Prefix caching would change the first step of repeated prompts.
    argv += ["--disable-radix-cache", "--skip-server-warmup"]
    argv += ["--host", host, "--port", str(port)]
    if plan.r2ccl:
        argv += ["--distributed-backend", "r2ccl"]
    if len(places) > 1:
        argv += ["--nnodes", str(len(places)), "--node-rank", str(index)]
        argv += ["--dist-init-addr", f"{places[0].address}:{master_port}"]
    return argv
