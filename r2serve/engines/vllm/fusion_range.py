"""Limits of the fused all-reduce, addition and RMSNorm, and the matching ranges of rows.

vLLM compiles a graph for each range of rows. A range ends at the capacity of the kernel's slots,
so decode steps are fused, and larger steps keep vLLM's own passes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from r2serve.config import Config
from r2serve.kernels.checks import FLOATS, MAX_PEERS, names
from r2serve.kernels.rms_norm import MAX_HIDDEN

if TYPE_CHECKING:
    import torch

_LINE_BYTES = 128  # granularity of a slot in the staging memory (csrc/device/addresses.hpp)


def split(vllm_config: Any, config: Config) -> None:
    """Ends a range of compilation at the last row of the fused operation, if fusion is possible.

    vLLM calls this first for the main model. Parts of the model and draft models share the
    compilation config; for these models vLLM has computed the ranges already, and the call changes
    nothing.

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
    """Returns the bytes of a slot, equal to ``most_bytes`` of the core's ``slots()``."""
    return staging_bytes // ranks // _LINE_BYTES * _LINE_BYTES


def most_rows(staging_bytes: int, ranks: int, hidden: int, dtype: torch.dtype) -> int:
    """Returns the row limit of the fused operation with a node for each rank; 0: no fusion."""
    if exceeded(staging_bytes, ranks, hidden, dtype):
        return 0
    return slot_bytes(staging_bytes, ranks) // (hidden * dtype.itemsize)


def exceeded(staging_bytes: int, ranks: int, hidden: int, dtype: torch.dtype) -> str:
    """Returns the exceeded limit of :meth:`r2serve.fused.FusedReduce.takes`; empty: a row fits."""
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
    """Whether each rank of a tensor-parallel group is known to be on a separate node.

    Ray does not report nodes, so vLLM counts all ranks on a single node, and the answer is False.
    """
    if parallel.tensor_parallel_size == 1:
        return False
    return bool(config.node == "per-rank" or parallel.local_world_size == 1)
