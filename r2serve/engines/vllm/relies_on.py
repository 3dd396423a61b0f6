"""The complete list of this plugin's changes to vLLM: seams, and replacements of classes.

The plugin uses vLLM's own seams, with four exceptions. Behind a relay it replaces torch's TCPStore
in a module of vLLM, and the function ``get_ip`` in two modules
(:mod:`r2serve.engines.vllm.relies_on_control`). In the first process it wraps the method that
watches engine processes (:mod:`r2serve.engines.vllm.engine_deaths`), and at node 0 without a relay
the function that waits for the engines of all nodes (:mod:`r2serve.engines.vllm.handshake`).
:data:`ROWS` has a row for each seam: purpose, condition for removal, and expectations of a release.
Tests compare every row with facts from the sources of every supported release, 0.32 and 0.33.
``tests/engines/contracts/README.md`` has the table of seams and releases. This module imports
nothing from vLLM.
"""

from __future__ import annotations

from r2serve.engines.vllm import engine_deaths
from r2serve.engines.vllm.classes import (
    COMMUNICATORS,
    PASS_MANAGER,
    PLATFORMS,
    RELEASES,
    WORKERS,
    of_each,
    row,
)
from r2serve.engines.vllm.exit_status import DEATH, DEATHS
from r2serve.engines.vllm.relies_on_collectives import COMMUNICATOR_ROWS, FUSION_ROWS
from r2serve.engines.vllm.relies_on_control import CONTROL_ROWS
from r2serve.seams import (
    Accepts,
    Has,
    InOrder,
    Says,
    StoodInFor,
    Subclass,
    Takes,
    There,
)

__all__ = ["COMMUNICATORS", "PASS_MANAGER", "PLATFORMS", "RELEASES", "ROWS", "WORKERS"]

_GROUPS = "vllm.distributed.parallel_state"
_PARALLEL = "vllm.config.ParallelConfig"
_SCHEDULED = "vllm.v1.core.sched.output"
_OUTPUT = "vllm.v1.outputs.AsyncModelRunnerOutput"
_DEVICE = "vllm.distributed.device_communicators"
_MANAGER = f"{engine_deaths.MODULE}.{engine_deaths.MANAGER}"

_PLATFORM_ROWS = (
    row(
        "entry point vllm.platform_plugins",
        "replaces vLLM's platform class by a subclass in r2serve",
        "vLLM lets a plugin replace only the communicator",
        There("vllm.plugins.PLATFORM_PLUGINS_GROUP", "'vllm.platform_plugins'"),
        There("vllm.platforms.builtin_platform_plugins"),
        There("vllm.envs.VLLM_PLUGINS"),
        InOrder("vllm.plugins.load_plugins_by_group", ("envs.VLLM_PLUGINS", "entry_points")),
        InOrder(
            "vllm.platforms.resolve_current_platform_cls_qualname",
            ("load_plugins_by_group", "builtin_platform_plugins.items", "activated_oot_plugins"),
        ),
        *(Subclass(base) for base in PLATFORMS),
        *(Has(base, ("device_type", "dist_backend")) for base in PLATFORMS),
    ),
    row(
        "Platform.pre_register_and_update",
        "adds the flag; without a parser validates R2CCL_* before workers start",
        "vLLM lets plugins add options",
        *of_each(PLATFORMS, "pre_register_and_update", "cls, parser=None"),
        InOrder(
            "vllm.engine.arg_utils.EngineArgs.create_engine_config",
            ("current_platform.pre_register_and_update",),
        ),
        InOrder(
            "vllm.engine.arg_utils.AsyncEngineArgs.add_cli_args",
            ("current_platform.pre_register_and_update",),
        ),
    ),
    row(
        "Platform.check_and_update_config",
        "records the backend in additional_config (part of the compile-cache key) and the number "
        "of workers per node; replaces vLLM's worker class by a subclass in r2serve",
        "vLLM lets a plugin set the worker class and a part of the cache key",
        *of_each(PLATFORMS, "check_and_update_config", "cls, vllm_config"),
        InOrder(
            "vllm.config.VllmConfig.__post_init__", ("current_platform.check_and_update_config",)
        ),
        Has(
            "vllm.config.VllmConfig",
            (
                "additional_config",
                "compilation_config",
                "kernel_config",
                "model_config",
                "parallel_config",
                "scheduler_config",
            ),
        ),
        Has(
            _PARALLEL,
            (
                "data_parallel_size",
                "data_parallel_size_local",
                "distributed_executor_backend",
                "local_world_size",
                "nnodes",
                "worker_cls",
            ),
        ),
        Has("vllm.config.compilation.PassConfig", ("fuse_allreduce_rms",)),
    ),
    row(
        "options that r2ccl refuses",
        "reads options for traffic that would bypass r2ccl, and the nodes of experts, before "
        "workers start",
        "r2ccl carries this traffic, too",
        Has("vllm.config.KernelConfig", ("moe_backend",)),
        Has(
            _PARALLEL,
            (
                "all2all_backend",
                "data_parallel_backend",
                "data_parallel_external_lb",
                "enable_elastic_ep",
                "enable_eplb",
                "enable_expert_parallel",
                "eplb_config",
                "nnodes_within_dp",
                "prefill_context_parallel_size",
                "tensor_parallel_size",
                "use_all2all",
            ),
        ),
        Has("vllm.config.parallel.EPLBConfig", ("communicator",)),
        There("vllm.envs.VLLM_DP_SIZE"),
        Says(
            "file:vllm/distributed/parallel_state.py",
            (
                "all_ranks = torch.arange(world_size).reshape(-1, data_parallel_size, "
                "pipeline_model_parallel_size, prefill_context_model_parallel_size, "
                "tensor_model_parallel_size,)",
            ),
        ),
        Accepts("vllm.config.get_current_vllm_config_or_none", ""),
    ),
    row(
        "release and GPU",
        "warns of an unsupported release; refuses a GPU or driver without starting CUDA",
        "",
        There("vllm.__version__"),
        There("vllm.platforms.cuda.nvml_available"),
        Accepts("vllm.platforms.cuda.CudaPlatform.get_device_capability", "cls"),
    ),
    row(
        "elastic EP builds CudaCommunicator itself",
        "the reason why elastic EP is refused at start",
        "the coordinator takes any communicator class",
        InOrder(
            "vllm.distributed.stateless_coordinator.StatelessGroupCoordinator.__init__",
            (
                "current_platform.get_device_communicator_cls",
                "CudaCommunicator",
                "tcp_store_group=",
            ),
        ),
    ),
    row(
        "Platform.get_device_communicator_cls",
        "replaces the platform's communicator by a subclass in r2serve",
        "",
        *of_each(PLATFORMS, "get_device_communicator_cls", "cls"),
    ),
    row(
        "Platform.dist_backend (CUDA)",
        "sets the backend r2ccl of torch.distributed for device_group of every group, if the "
        "engine spans nodes",
        "vLLM lets a communicator choose its group's backend",
        There("vllm.platforms.cuda.CudaPlatform.dist_backend", "'nccl'"),
        InOrder("vllm.v1.worker.gpu_worker.Worker.init_device", ("current_platform.dist_backend",)),
        There("vllm.envs.VLLM_DISTRIBUTED_USE_SPLIT_GROUP"),
    ),
    row(
        "Platform.get_pass_manager_cls",
        "adds r2serve's compiler pass, before vLLM's own; on the CPU with R2CCL_FUSE=on also "
        "restores vLLM's compilation mode",
        "vLLM lets a plugin register a pass",
        *of_each(PLATFORMS, "get_pass_manager_cls", "cls"),
        InOrder(
            "vllm.compilation.backends.VllmBackend.__init__",
            ("current_platform.get_pass_manager_cls",),
        ),
        Has(
            "vllm.config.CompilationConfig",
            ("mode", "pass_config", "ir_enable_torch_wrap", "compile_sizes"),
        ),
        Has("vllm.config.CompilationMode", ("NONE", "VLLM_COMPILE")),
    ),
    row(
        "Platform.use_custom_op_collectives",
        "returns True for groups on several nodes; relies on the order in "
        "GroupCoordinator.__init__: first the communicator, then this call",
        "vLLM passes the group to this call",
        *of_each(PLATFORMS, "use_custom_op_collectives", "cls"),
        InOrder(
            f"{_GROUPS}.GroupCoordinator.__init__",
            (
                "current_platform.get_device_communicator_cls",
                "device_comm_cls",
                "current_platform.use_custom_op_collectives",
            ),
        ),
    ),
    row(
        "Platform.device_count (CPU)",
        "returns the workers of a node: MessageQueue computes the ranks of a node from the count, "
        "and with torch's count of 1 an assertion of vLLM fails for 2 workers per node",
        "MessageQueue uses the local world size",
        InOrder(
            f"{_DEVICE}.shm_broadcast.MessageQueue.create_from_process_group_single_reader",
            ("current_platform.device_count",),
        ),
        Takes("vllm.platforms.cuda.CudaPlatform.device_count", "cls"),
    ),
    row(
        "Platform.additional_env_vars",
        "Ray's first executor copies r2serve's variables to the workers",
        "r2serve no longer supports 0.32: 0.33 has only the second executor",
        *(Has(base, ("additional_env_vars",)) for base in PLATFORMS),
        InOrder(
            "vllm.v1.executor.ray_executor.RayDistributedExecutor._init_workers_ray",
            ("additional_vars=", "current_platform.additional_env_vars"),
        ),
        releases=("0.32.0",),
    ),
    row(
        "environment of Ray's second executor",
        "copies the whole environment to the workers, r2serve's variables included",
        "",
        *(Has(base, ("additional_env_vars",)) for base in PLATFORMS),
        InOrder(
            "vllm.v1.executor.ray_env_utils.get_driver_env_vars",
            ("worker_specific_vars", "os.environ.items"),
        ),
    ),
)

_WORKER_ROWS = (
    row(
        "Worker.execute_model, sample_tokens",
        "reports begin, end and requests of each step; ends the worker after a fatal error",
        "vLLM has a hook for steps",
        *(Subclass(base) for base in WORKERS),
        *of_each(
            WORKERS,
            "__init__",
            "self, vllm_config, local_rank, rank, distributed_init_method, is_driver_worker=False",
        ),
        *of_each(WORKERS, "execute_model", "self, scheduler_output"),
        *of_each(WORKERS, "sample_tokens", "self, grammar_output"),
        *of_each(WORKERS, "checkpoint_prepare", "self"),
        *(Has(base, ("local_rank", "vllm_config")) for base in WORKERS),
        Has(_PARALLEL, ("data_parallel_index", "worker_cls")),
        Has("vllm.config.ModelConfig", ("served_model_name",)),
    ),
    row(
        "AsyncModelRunnerOutput.get_output",
        "a stand-in checks for lost peers after get_output and forwards all else; the stand-in is "
        "not a subclass, so a new abstract method does not break it",
        "vLLM has a hook in the worker before tokens leave",
        StoodInFor(_OUTPUT, "get_output"),
        Takes(f"{_OUTPUT}.get_output", "self"),
        InOrder(
            "vllm.v1.executor.multiproc_executor.WorkerProc.enqueue_output",
            ("AsyncModelRunnerOutput", "output.get_output"),
        ),
        StoodInFor("vllm.v1.worker.gpu_model_runner.AsyncGPUModelRunnerOutput", "get_output"),
        StoodInFor(
            "vllm.v1.worker.gpu_model_runner.AsyncGPUPoolingModelRunnerOutput", "get_output"
        ),
        StoodInFor("vllm.v1.worker.gpu.async_utils.AsyncOutput", "get_output"),
        StoodInFor("vllm.v1.worker.gpu.async_utils.AsyncPoolingOutput", "get_output"),
    ),
    row(
        "message about a worker that ended",
        "the process that logs the message ends with a status other than 0, so that a supervisor "
        "starts the node again",
        "a node without the HTTP server ends with a status other than 0",
        There(f"{DEATHS.name}.logger", "init_logger(__name__)"),
        InOrder(
            f"{DEATHS.name}.MultiprocExecutor.start_worker_monitor",
            (
                "logger.error",
                repr(f"{DEATH} (exit code: %s), shutting down executor."),
                "proc.name",
                "proc.exitcode",
            ),
        ),
    ),
    row(
        "CoreEngineProcManager.monitor_engine_liveness",
        "wrapped in the first process: the death of an engine process whose only worker lives "
        "inside ends the first process with a status other than 0",
        "vLLM ends with a status other than 0 after the death of an engine process",
        Takes(f"{_MANAGER}.{engine_deaths.WATCH}", "self"),
        InOrder(
            f"{_MANAGER}.{engine_deaths.WATCH}",
            ("self.manager_stopped.is_set", "proc.exitcode", "self.failed_proc_name"),
        ),
        Has(_MANAGER, ("failed_proc_name", "processes")),
    ),
    row(
        "exit of a follower node",
        "an exit function keeps the workers of a follower that is told to stop until its leader "
        "has ended, for at most --shutdown-timeout; relies on workers that end in an exit function",
        "a follower that is told to stop keeps its workers while its leader finishes requests",
        Has("vllm.config.VllmConfig", ("shutdown_timeout",)),
        Has(_PARALLEL, ("node_rank_within_dp",)),
        InOrder(
            "vllm.entrypoints.cli.serve.run_headless",
            (
                "engine_args.create_engine_config",
                "SystemExit",
                "signal.signal",
                "parallel_config.node_rank_within_dp",
                "MultiprocExecutor",
                "executor.start_worker_monitor",
            ),
        ),
        InOrder(
            "vllm.v1.executor.multiproc_executor.MultiprocExecutor._init_executor",
            ("weakref.finalize", "self.shutdown"),
        ),
        InOrder(
            "vllm.v1.executor.multiproc_executor.WorkerProc.make_worker_process",
            ("context.Process", "daemon="),
        ),
    ),
    row(
        "SchedulerOutput",
        "reads the requests of a step, with tokens and stage, to compute the impact of faults",
        "vLLM has a hook for steps",
        Has(
            f"{_SCHEDULED}.SchedulerOutput",
            (
                "finished_req_ids",
                "num_scheduled_tokens",
                "scheduled_cached_reqs",
                "scheduled_new_reqs",
            ),
        ),
        Has(
            f"{_SCHEDULED}.NewRequestData",
            ("num_computed_tokens", "prefill_token_ids", "prompt_len", "req_id"),
        ),
        Has(
            f"{_SCHEDULED}.CachedRequestData",
            ("num_computed_tokens", "num_output_tokens", "req_ids"),
        ),
    ),
    row(
        "entry point vllm.stat_logger_plugins",
        "reads the timings of each request as seen by the client",
        "",
        There("vllm.plugins.STAT_LOGGER_PLUGINS_GROUP", "'vllm.stat_logger_plugins'"),
        InOrder(
            "vllm.v1.metrics.loggers.load_stat_logger_plugin_factories",
            ("STAT_LOGGER_PLUGINS_GROUP", "StatLoggerBase"),
        ),
        Subclass(
            "vllm.v1.metrics.loggers.StatLoggerBase",
            ("__init__", "log_engine_initialized", "record"),
        ),
        Takes(
            "vllm.v1.metrics.loggers.StatLoggerBase.__init__", "self, vllm_config, engine_index=0"
        ),
        Takes(
            "vllm.v1.metrics.loggers.StatLoggerBase.record",
            "self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0",
        ),
        Takes("vllm.v1.metrics.loggers.StatLoggerBase.log_engine_initialized", "self"),
        Has("vllm.v1.metrics.stats.IterationStats", ("finished_requests",)),
        Has(
            "vllm.v1.metrics.stats.FinishedRequestStats",
            (
                "decode_time",
                "e2e_latency",
                "finish_reason",
                "num_generation_tokens",
                "num_prompt_tokens",
                "prefill_time",
                "queued_time",
                "request_id",
            ),
        ),
    ),
)

ROWS = (*_PLATFORM_ROWS, *COMMUNICATOR_ROWS, *_WORKER_ROWS, *FUSION_ROWS, *CONTROL_ROWS)
"""All rows, in the order of the table."""
