"""Limits of the kernel for all-reduce, addition and RMSNorm, and ranges of rows that fit them.

vLLM compiles a graph for each range of rows.  A range ends at the capacity of the kernel's slots,
so decode steps are fused, and larger steps keep vLLM's own passes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from r2serve.config import Config
from r2serve.kernels.checks import FLOATS, MAX_PEERS, names
from r2serve.kernels.rms_norm import MAX_HIDDEN

if TYPE_CHECKING:
    import torch

_LINE_BYTES = 128  # unit of a rank's part of the staging memory (device/addresses.hpp)


def split(vllm_config: Any, config: Config) -> None:
    """End a range of compilation at the last row of the fused operation, if it may be used.

    A configuration of compilation is split once, for the model of the engine.  Parts of a model
    and draft models share the configuration, and vLLM has computed its ranges by then.

    Args:
        vllm_config: an engine's VllmConfig.
    """
    compilation, model = vllm_config.compilation_config, vllm_config.model_config
    ends = compilation.compile_ranges_endpoints or []
    computed = vllm_config.scheduler_config.max_num_batched_tokens in ends
    if model is None or computed or not _may_fuse(vllm_config.parallel_config, config):
        return
    ranks = vllm_config.parallel_config.tensor_parallel_size
    rows = most_rows(config.gpu_staging_bytes, ranks, model.get_hidden_size(), model.dtype)
    if rows > 0 and rows not in ends:
        compilation.compile_ranges_endpoints = [*ends, rows]


def slot_bytes(staging_bytes: int, ranks: int) -> int:
    """Size of a rank's part, ``most_bytes`` of the core's ``slots()``."""
    return staging_bytes // ranks // _LINE_BYTES * _LINE_BYTES


def most_rows(staging_bytes: int, ranks: int, hidden: int, dtype: torch.dtype) -> int:
    """Rows taken by the fused operation where each rank is on a node of its own; 0: none."""
    if exceeded(staging_bytes, ranks, hidden, dtype):
        return 0
    return slot_bytes(staging_bytes, ranks) // (hidden * dtype.itemsize)


def exceeded(staging_bytes: int, ranks: int, hidden: int, dtype: torch.dtype) -> str:
    """The limit of :meth:`r2serve.fused.FusedReduce.takes` exceeded by a row; empty: none."""
    if ranks > MAX_PEERS:
        return f"the group has {ranks} ranks; the limit is {MAX_PEERS}"
    if dtype not in FLOATS:
        return f"rows are of {names([dtype])}; the operation takes {names(FLOATS)}"
    if hidden > MAX_HIDDEN:
        return f"a row has {hidden} elements; the limit is {MAX_HIDDEN}"
    row, slot = hidden * dtype.itemsize, slot_bytes(staging_bytes, ranks)
    if row > slot:
        return f"a row has {row} bytes; the limit is {slot} (R2CCL_GPU_STAGING_BYTES / ranks)"
    return ""


def _may_fuse(parallel: Any, config: Config) -> bool:
    """Whether each rank of a tensor-parallel group is known to be on a node of its own.

    Ray does not tell its nodes, and vLLM then counts all ranks on one node.
    """
    if parallel.tensor_parallel_size == 1:
        return False
    return bool(config.node == "per-rank" or parallel.local_world_size == 1)
