"""vLLM's platform for this machine, with r2ccl's communicator under the flag.

A function makes a class for each platform of vLLM; :mod:`r2serve.engines.vllm.classes` lists the
classes. Without the flag every method calls vLLM's method; nodes still compare their flags.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from typing import Any, ClassVar

import vllm

from r2serve.config import Config
from r2serve.engines import flag, releases, sidecar
from r2serve.engines.vllm import (
    carried,
    classes,
    combinations,
    engine_deaths,
    exit_status,
    same_flag,
    stopping,
)
from r2serve.errors import ConfigError

_LOG = logging.getLogger(__name__)


def __getattr__(name: str) -> Any:
    """Makes the class on first use, because its base exists only on the matching machine."""
    for base, ours in classes.PLATFORMS.items():
        module, _, class_name = ours.rpartition(".")
        if module == __name__ and class_name == name:
            return make_platform(_resolve(base), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _resolve(qualified_name: str) -> Any:
    module, _, name = qualified_name.rpartition(".")
    return getattr(importlib.import_module(module), name)


@functools.cache
def make_platform(base: type[Any], name: str) -> type[Any]:
    """Returns a subclass of vLLM's platform class ``base`` with ``--distributed-backend``."""

    class R2cclPlatform(base):  # type: ignore[misc]
        additional_env_vars: ClassVar[list[str]] = [*base.additional_env_vars, *carried.CARRIED]

        @classmethod
        def pre_register_and_update(cls, parser: Any = None) -> None:
            super().pre_register_and_update(parser)
            if parser is not None:
                flag.add_to(parser)
            else:  # vLLM makes the engine's configuration next: the last check before workers
                flag.check_environment()

        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None:
            carried.read_additional_config(vllm_config.additional_config)
            mode = vllm_config.compilation_config.mode
            super().check_and_update_config(vllm_config)
            if flag.active():
                _check_and_extend(cls, base, vllm_config, mode)
            else:
                sidecar.say_if_useless()
                _compare_nodes(vllm_config)

        @classmethod
        def get_device_communicator_cls(cls) -> str:
            stock: str = super().get_device_communicator_cls()
            same_flag.compare()
            return _communicator_for(stock) if flag.active() else stock

        @property
        def dist_backend(self) -> str:
            """torch.distributed backend of every ``device_group``: r2ccl, or vLLM's own.

            vLLM sends tensors of pipeline stages, counts and tokens on a ``device_group``.
            """
            stock: str = base.dist_backend
            if base.device_type == "cuda" and _carries_device_groups(stock):
                return _our_backend()
            return stock

        @classmethod
        def get_pass_manager_cls(cls) -> str:
            if _fuses(base):
                return classes.PASS_MANAGER
            stock: str = super().get_pass_manager_cls()
            return stock

        @classmethod
        def use_custom_op_collectives(cls) -> bool:
            if flag.active():
                from r2serve.engines import nodes

                # Dynamo must not trace into sockets, so r2ccl needs the custom op. The engine's
                # own path reduces in place, which contradicts the op's declaration.
                if nodes.latest_group_spans_nodes():
                    return True
            return bool(super().use_custom_op_collectives())

        @classmethod
        def device_count(cls) -> int:
            workers = os.environ.get(carried.WORKERS_VARIABLE)
            if flag.active() and workers is not None and base.device_type == "cpu":
                return int(workers)
            return _stock_device_count(base)

    R2cclPlatform.__name__ = R2cclPlatform.__qualname__ = name
    return R2cclPlatform


def _check_and_extend(platform: Any, base: Any, vllm_config: Any, mode: Any) -> None:
    """Checks the engine's configuration under the flag, and adds r2serve's parts.

    mode: the compilation mode before vLLM's own update.
    """
    flag.check_environment()
    releases.warn_if_unsupported("vllm", vllm.__version__)
    combinations.refuse_elastic_groups(vllm_config.parallel_config)
    spans = _spans_nodes(vllm_config.parallel_config)
    os.environ[flag.SPANS_VARIABLE] = str(int(spans))
    if spans:
        if combinations.has_ranks_here(vllm_config.parallel_config):
            from r2serve.engines import rails  # loads the core, unlike the choice of a platform

            rails.check()
        if base.device_type == "cuda":
            _refuse_on_gpus(platform, base, vllm_config)
        # FlashInfer's fusion would bypass the group's communicator.
        vllm_config.compilation_config.pass_config.fuse_allreduce_rms = False
        if _fuses(base):
            _let_passes_run(vllm_config.compilation_config, mode)
            if base.device_type == "cuda":
                from r2serve.engines.vllm import fusion_range

                fusion_range.split(vllm_config, Config.from_env())
        from r2serve.engines.vllm import control

        _compare_nodes(vllm_config)
        control.carry(vllm_config)
    _note_in(vllm_config)
    _follow_steps(vllm_config.parallel_config)
    exit_status.listen_once()
    engine_deaths.hear_once()
    stopping.keep_workers_once(vllm_config)
    sidecar.start_once()


def _compare_nodes(vllm_config: Any) -> None:
    """Compares the choices of all nodes, with or without the flag; a single node does nothing."""
    parallel = vllm_config.parallel_config
    everywhere = getattr(parallel, "data_parallel_size", 1)
    elsewhere = everywhere > getattr(parallel, "data_parallel_size_local", everywhere)
    if elsewhere or getattr(parallel, "nnodes", 1) > 1:
        from r2serve.engines.vllm import node_values

        node_values.compare_once(vllm_config)


def _refuse_on_gpus(platform: Any, base: Any, vllm_config: Any) -> None:
    """Refuses options, GPUs and drivers on which workers would fail."""
    from r2serve.engines.vllm import gpus

    config = Config.from_env()
    per_rank = config.node == "per-rank"
    combinations.refuse_in_config(vllm_config, per_rank_nodes=per_rank)
    parallel = vllm_config.parallel_config
    if not combinations.engine_spans_nodes(parallel, per_rank_nodes=per_rank):
        return  # a group that spans nodes runs the checks in its worker
    # Without NVML vLLM would initialise CUDA here, and forked workers could not use CUDA.
    by_nvml = getattr(importlib.import_module(base.__module__), "nvml_available", False)
    gpus.check(config.cuda_library, platform.get_device_capability() if by_nvml else None)


def _communicator_for(stock: str) -> str:
    """Returns our subclass of vLLM's communicator class. Raises ConfigError without a subclass."""
    if stock not in classes.COMMUNICATORS:
        raise ConfigError(
            "--distributed-backend is r2ccl: must be default, because r2ccl has no "
            f"communicator for {stock}"
        )
    return classes.COMMUNICATORS[stock]


def _our_backend() -> str:
    """Configures the backend of torch.distributed for groups made later; returns its name."""
    from r2serve.engines.torch import BACKEND, use_config, use_management_address
    from r2serve.engines.vllm.management_address import management_address

    flag.keep_journals()
    use_config(flag.group_config())
    use_management_address(management_address())
    return BACKEND


def _fuses(base: Any) -> bool:
    """Whether the compiler fuses the all-reduce with the operations after it."""
    if not flag.active():
        return False
    wanted = Config.from_env().fuse
    return wanted == "on" or (wanted == "auto" and base.device_type == "cuda")


def _spans_nodes(parallel: Any) -> bool:
    """Whether groups of this engine may span nodes."""
    ray = getattr(parallel, "distributed_executor_backend", None) == "ray"  # nodes are unknown
    everywhere = getattr(parallel, "data_parallel_size", 1)
    elsewhere = everywhere > getattr(parallel, "data_parallel_size_local", everywhere)
    return parallel.nnodes > 1 or elsewhere or ray or Config.from_env().node == "per-rank"


def _carries_device_groups(stock: str) -> bool:
    """Whether r2ccl replaces ``stock`` as the backend of every ``device_group``.

    vLLM names a single backend for all groups, so groups inside a node use r2ccl, too.
    """
    if not flag.active() or os.environ.get(flag.SPANS_VARIABLE) != "1":
        return False
    if os.environ.get("VLLM_DISTRIBUTED_USE_SPLIT_GROUP", "0") not in ("", "0"):
        _LOG.warning(
            "VLLM_DISTRIBUTED_USE_SPLIT_GROUP is set: traffic of engine code on a group's "
            "device_group stays with %s, without failover",
            stock,
        )
        return False
    return True


def _let_passes_run(compilation: Any, mode: Any) -> None:
    """Restores vLLM's compilation mode with passes; vLLM's CPU platform disables its passes."""
    from vllm.config import CompilationMode

    if mode == CompilationMode.VLLM_COMPILE and compilation.mode != CompilationMode.NONE:
        compilation.mode = mode
        compilation.ir_enable_torch_wrap = True
        compilation.compile_sizes = compilation.compile_sizes or []  # not set on the CPU


def _note_in(vllm_config: Any) -> None:
    """Adds to the engine's configuration the facts that distinguish its compile cache."""
    parallel = vllm_config.parallel_config
    if isinstance(vllm_config.additional_config, dict):
        vllm_config.additional_config[carried.SECTION] = {
            "distributed_backend": "r2ccl",
            "nnodes": parallel.nnodes,
            "per_rank_nodes": os.environ.get("R2CCL_NODE") == "per-rank",
            "fuse": os.environ.get("R2CCL_FUSE", ""),
            "gpu_staging_bytes": os.environ.get("R2CCL_GPU_STAGING_BYTES", ""),
        }
    # vLLM derives the ranks of a node from the device count, but torch reports a single CPU.
    os.environ[carried.WORKERS_VARIABLE] = str(parallel.local_world_size)


def _follow_steps(parallel: Any) -> None:
    """Replaces vLLM's worker class by our subclass."""
    theirs = parallel.worker_cls
    if theirs in classes.WORKERS:
        parallel.worker_cls = classes.WORKERS[theirs]
    elif theirs not in classes.WORKERS.values():
        _LOG.warning("worker class %s is not supported: per-request impact is disabled", theirs)


def _stock_device_count(base: type[Any]) -> int:
    """Returns vLLM's device count; a class without the method uses ``torch.<device_type>``."""
    own = getattr(base, "device_count", None)
    if own is not None:
        return int(own())
    import torch

    return int(getattr(torch, base.device_type).device_count())
