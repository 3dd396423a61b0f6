"""Checks for vLLM options incompatible with r2ccl, before workers start.

A configuration does not tell where Ray or an external load balancer places a rank, so groups repeat
the checks in the worker.
"""

from __future__ import annotations

from typing import Any

from r2serve.errors import ConfigError

ALL2ALL = "allgather_reducescatter"
"""The only exchange between experts carried by r2ccl; it uses a group's communicator."""
_PASSTHROUGH = "passthrough"  # vLLM's value for MoE back ends that exchange tokens themselves
_WAY_OUT = "or --distributed-backend default, without failover"


def refuse_elastic_groups(parallel: Any) -> None:
    """Refuses groups of varying size, on every platform and number of nodes.

    Args:
        parallel: vLLM's ParallelConfig.

    Raises:
        ConfigError: names option, value and what would be right.
    """
    if parallel.enable_elastic_ep:
        raise ConfigError(
            "--enable-elastic-ep is True: vLLM makes groups of varying size with its own "
            f"communicator only; --enable-elastic-ep must be left out, {_WAY_OUT}"
        )


def refuse_in_config(config: Any, *, per_rank_nodes: bool) -> None:
    """Refuses GPU options that fail in an expert group, if the group is known to span nodes.

    Args:
        config: vLLM's VllmConfig.
        per_rank_nodes: every rank counts as a separate node (``R2CCL_NODE=per-rank``).

    Raises:
        ConfigError: names option, value and what would be right.
    """
    if expert_group_spans_nodes(config.parallel_config, per_rank_nodes=per_rank_nodes):
        refuse_in_group("ep", config)
        refuse_in_group("eplb", config)


def refuse_in_group(group: str, config: Any) -> None:
    """Refuses options that fail in a group of GPUs on several nodes; called in the worker.

    Args:
        group: vLLM's name of the group, with or without a number (``ep``, ``ep:0``).
        config: vLLM's VllmConfig.

    Raises:
        ConfigError: names option, value and what would be right.
    """
    kind = group.split(":")[0]
    parallel = config.parallel_config
    if kind == "ep" and parallel.enable_expert_parallel and parallel.use_all2all:
        _refuse_all2all(config)
    communicator = parallel.eplb_config.communicator
    if kind == "eplb" and parallel.enable_eplb and communicator == "pynccl":
        raise ConfigError(
            "--eplb-config.communicator is 'pynccl': r2ccl carries the group, which spans nodes, "
            "and there is no NCCL communicator; --eplb-config.communicator must be nixl, "
            f"torch_gloo or torch_nccl (which r2ccl carries), {_WAY_OUT}"
        )


def _refuse_all2all(config: Any) -> None:
    backend = config.parallel_config.all2all_backend
    if backend == ALL2ALL:
        return
    if backend == _PASSTHROUGH:
        raise ConfigError(
            f"--moe-backend is {config.kernel_config.moe_backend!r}, which exchanges tokens "
            "between experts without r2ccl, but the group of experts spans nodes; --moe-backend "
            f"must be a back end that does not exchange tokens itself, such as auto, {_WAY_OUT}"
        )
    raise ConfigError(
        f"--all2all-backend is {backend!r}, which exchanges tokens between experts without r2ccl, "
        f"but the group of experts spans nodes; --all2all-backend must be {ALL2ALL}, {_WAY_OUT}"
    )


def engine_spans_nodes(parallel: Any, *, per_rank_nodes: bool) -> bool:
    """Whether ranks of the engine are known to be on several nodes.

    Args:
        parallel: vLLM's ParallelConfig.
        per_rank_nodes: every rank counts as a separate node (``R2CCL_NODE=per-rank``).
    """
    if per_rank_nodes or parallel.nnodes > 1:
        return True
    return not _ray_places_ranks(parallel) and _replicas_are_elsewhere(parallel)


def expert_group_spans_nodes(parallel: Any, *, per_rank_nodes: bool) -> bool:
    """Whether the expert-parallel group is known to have ranks on several nodes.

    The group has all ranks of a pipeline stage: tensor, prefill-context and data parallelism.
    vLLM orders ranks by data, pipeline, prefill context, tensor.
    """
    of_replica = parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
    if per_rank_nodes:
        return bool(of_replica * parallel.data_parallel_size > 1)
    if _ray_places_ranks(parallel):
        return False
    if _replicas_are_elsewhere(parallel):
        return True
    # A node has `local_world_size` consecutive ranks of a replica.
    return bool(parallel.nnodes_within_dp > 1 and parallel.local_world_size % of_replica != 0)


def has_ranks_here(parallel: Any) -> bool:
    """Whether this node is known to have ranks: Ray may place all elsewhere.

    A node with the API server alone has no local replica.
    """
    return not _ray_places_ranks(parallel) and parallel.data_parallel_size_local != 0


def _ray_places_ranks(parallel: Any) -> bool:
    return "ray" in (parallel.distributed_executor_backend, parallel.data_parallel_backend)


def _replicas_are_elsewhere(parallel: Any) -> bool:
    """Whether another node is known to have some of the data-parallel replicas."""
    from vllm import envs

    # Both options set one local replica a process, on any number of nodes.
    if parallel.data_parallel_external_lb or envs.VLLM_DP_SIZE > 1:
        return False
    # 0: a node with the API server alone; the replicas may share a single other node.
    return bool(0 < parallel.data_parallel_size_local < parallel.data_parallel_size)
