"""Up to how many rows a graph may have, so that all-reduce, addition and RMSNorm fit one kernel.

vLLM compiles a graph for each range of rows.  A range that ends where the kernel's slots do lets
decode steps be fused, and leaves larger steps to vLLM's own passes.
"""

from __future__ import annotations

from typing import Any

from r2serve.config import Config

_LINE_BYTES = (
    128  # what a rank's part of the staging memory is rounded down to (device/addresses.hpp)
)


def split(vllm_config: Any, config: Config) -> None:
    """End a range of compilation where the fused operation does, if there may be one.

    Args:
        vllm_config: an engine's VllmConfig, before vLLM has computed its ranges.
    """
    if vllm_config.model_config is None or not _may_fuse(vllm_config.parallel_config, config):
        return
    rows = most_rows(
        config.gpu_staging_bytes,
        vllm_config.parallel_config.tensor_parallel_size,
        vllm_config.model_config.get_hidden_size() * vllm_config.model_config.dtype.itemsize,
    )
    if rows > 0:
        compilation = vllm_config.compilation_config
        compilation.compile_ranges_endpoints = [*(compilation.compile_ranges_endpoints or ()), rows]


def most_rows(staging_bytes: int, ranks: int, row_bytes: int) -> int:
    """Rows that the part of one rank holds; 0: not one."""
    return staging_bytes // ranks // _LINE_BYTES * _LINE_BYTES // row_bytes


def _may_fuse(parallel: Any, config: Config) -> bool:
    """Whether each rank of a tensor-parallel group may be on a node of its own."""
    if parallel.tensor_parallel_size == 1:
        return False
    if config.node == "per-rank" or parallel.distributed_executor_backend == "ray":
        return True
    return bool(parallel.local_world_size == 1)
