"""Rows of a graph up to which all-reduce, addition and RMSNorm fit one kernel.

vLLM compiles a graph for each range of rows.  A range ends at the capacity of the kernel's slots,
so decode steps are fused, and larger steps keep vLLM's own passes.
"""

from __future__ import annotations

from typing import Any

from r2serve.config import Config

_LINE_BYTES = 128  # unit of a rank's part of the staging memory (device/addresses.hpp)


def split(vllm_config: Any, config: Config) -> None:
    """End a range of compilation at the last row of the fused operation, if it may be used.

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
    """Rows in the part of one rank; 0: a row is larger."""
    return staging_bytes // ranks // _LINE_BYTES * _LINE_BYTES // row_bytes


def _may_fuse(parallel: Any, config: Config) -> bool:
    """Whether no two ranks of a tensor-parallel group need share a node."""
    if parallel.tensor_parallel_size == 1:
        return False
    if config.node == "per-rank" or parallel.distributed_executor_backend == "ray":
        return True
    return bool(parallel.local_world_size == 1)
