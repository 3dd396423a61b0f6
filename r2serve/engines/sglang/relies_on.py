"""The complete list of this plugin's changes to SGLang: hooks, and the seams around them.

:data:`ROWS` has a row for each seam: purpose, condition for removal, and expectations of a release.
Tests compare every row with facts from the sources of the tested releases, and every hook of
``table.py`` with the rows. ``tests/engines/contracts/README.md`` has the table of seams and
releases. This module imports nothing from SGLang.
"""

from __future__ import annotations

from r2serve.seams import (
    Accepts,
    Expectation,
    Has,
    InOrder,
    Row,
    Says,
    Subclass,
    Takes,
    There,
)

RELEASES = ("0.5.23",)
"""Releases of SGLang checked against the rows."""

_SRT = "sglang.srt"
_PLUGINS = f"{_SRT}.plugins"
_REGISTRY = f"{_PLUGINS}.hook_registry"
_STATE = f"{_SRT}.distributed.parallel_state"
_COORDINATOR = f"{_STATE}.GroupCoordinator"
_NCCL = f"{_SRT}.distributed.device_communicators.pynccl.PyNcclCommunicator"
_SCHEDULER = f"{_SRT}.managers.scheduler.Scheduler"
_BATCH = f"{_SRT}.managers.schedule_batch.ScheduleBatch"
_REQUEST = f"{_SRT}.managers.schedule_batch.Req"
_MANAGER = f"{_SRT}.managers.tokenizer_manager.TokenizerManager"
_OPTIONS = f"{_SRT}.arg_groups"
_STATS = f"{_SRT}.observability.req_time_stats.APIServerReqTimeStats"


def row(seam: str, purpose: str, exit_: str, *expects: Expectation) -> Row:
    """Makes a row for every tested release of SGLang."""
    return Row(seam, purpose, exit_, expects, RELEASES)


_PLUGIN_ROWS = (
    row(
        "entry point sglang.srt.plugins",
        "registers the hooks in every process, before options are parsed",
        "",
        There(f"{_PLUGINS}.GENERAL_PLUGINS_GROUP", "'sglang.srt.plugins'"),
        InOrder(f"{_PLUGINS}.load_plugins", ("load_plugins_by_group", "HookRegistry.apply_hooks")),
        InOrder("sglang.cli.serve.serve", ("load_plugins", "registry.auto_detect")),
        InOrder(f"{_SRT}.managers.scheduler.run_scheduler_process", ("load_plugins", "Scheduler")),
        There(f"{_SRT}.entrypoints.engine.load_plugins"),
    ),
    row(
        "HookRegistry",
        "hooks functions and methods, and replaces a class",
        "",
        Accepts(f"{_REGISTRY}.HookRegistry.register", "cls, target, hook, kind"),
        Has(f"{_REGISTRY}.HookType", ("AFTER", "AROUND", "REPLACE")),
    ),
    row(
        "HookRegistry.apply_hooks",
        "wraps this call once, because SGLang only logs the errors of hooks: a hook that was not "
        "applied ends the process",
        "SGLang can be told to raise the errors of plugins",
        Takes(f"{_REGISTRY}.HookRegistry.apply_hooks", "cls"),
    ),
    row(
        "ServerArgs.add_cli_args",
        "adds the flag, with the check of hooks and R2CCL_*",
        "SGLang lets plugins add options",
        Takes(f"{_SRT}.server_args.ServerArgs.add_cli_args", "parser"),
    ),
    row(
        "step handle_other_validations of the configuration",
        "checks options before schedulers start, turns off every path around r2ccl, and starts the "
        "sidecar",
        "",
        Accepts(f"{_OPTIONS}.resolution_hooks.register_resolution_hook", "name"),
        InOrder(
            f"{_OPTIONS}.pipeline.run_resolution_pipeline",
            ("handle_environment_variables", "handle_other_validations"),
        ),
        Accepts(f"{_OPTIONS}.overrides.declare_resolution", "server_args, source, name="),
        Accepts(f"{_OPTIONS}.overrides.resolving_view", "server_args"),
        There("sglang.__version__"),
    ),
    row(
        "options that r2serve reads and sets",
        "refuses what has no plugin, warns of traffic that r2ccl does not carry, and turns off "
        "every path around r2ccl",
        "r2ccl carries this traffic, too",
        Says(
            f"file:{_OPTIONS.replace('.', '/')}/fields/parallel.py",
            ("nnodes: A[", "node_rank: A[", "dist_init_addr: A[", "attn_dp_size: A["),
        ),
        Says(
            f"file:{_OPTIONS.replace('.', '/')}/fields/exec_.py",
            (
                "disable_custom_all_reduce: A[",
                "enable_mscclpp: A[",
                "enable_torch_symm_mem: A[",
                "enable_symm_mem: A[",
                "enforce_disable_flashinfer_allreduce_fusion: A[",
                "flashinfer_allreduce_fusion_backend: A[",
                "pre_warm_nccl: A[",
                "moe_a2a_backend: A[",
                "elastic_ep_backend: A[",
            ),
        ),
        Says(f"file:{_OPTIONS.replace('.', '/')}/fields/device.py", ("use_ray: A[",)),
        Says(f"file:{_OPTIONS.replace('.', '/')}/fields/disagg.py", ("disaggregation_mode: A[",)),
        Says("file:sglang/srt/environ.py", ("SGLANG_ENABLE_PCIE_IPC_ALLREDUCE = EnvBool(",)),
    ),
)

_GROUP_ROWS = (
    row(
        "get_default_distributed_backend",
        "makes r2ccl the torch backend of WORLD and of each device_group that spans nodes",
        "SGLang has an option for the backend",
        Takes(f"{_STATE}.get_default_distributed_backend", "device"),
        InOrder(
            f"{_SRT}.distributed.bootstrap._resolve_backend",
            ("get_default_distributed_backend",),
        ),
    ),
    row(
        "torch.distributed.new_group",
        "makes r2ccl the backend of each cpu_group that spans nodes; SGLang asks for gloo",
        "SGLang has an option for the backend of cpu_group",
        InOrder(
            f"{_COORDINATOR}.__init__",
            ("torch.distributed.new_group", "backend=", "'gloo'"),
        ),
    ),
    row(
        "torch.distributed.monitored_barrier",
        "runs a barrier instead, because torch allows this call for gloo only",
        "torch allows the call for other backends",
        Says(
            "file:sglang/srt/model_executor/*load_model_utils.py",
            ("dist.monitored_barrier(",),
        ),
    ),
    row(
        "GroupCoordinator.__init__",
        "makes a communicator of a group on CPUs that spans nodes",
        "SGLang calls get_communicator_class of a platform",
        Accepts(
            f"{_COORDINATOR}.__init__",
            "self, group_ranks=, local_rank=, torch_distributed_backend=, use_pynccl=, "
            "use_mscclpp=, use_custom_allreduce=, use_torch_symm_mem_all_reduce=, "
            "use_hpu_communicator=, use_xpu_communicator=",
        ),
        Has(_COORDINATOR, ("cpu_group", "device", "unique_name", "world_size")),
        There(f"{_STATE}.get_tp_group"),
    ),
    row(
        "GroupCoordinator.all_reduce, all_gather",
        "calls the communicator before SGLang's path in shared memory, which does not reach "
        "another node",
        "SGLang calls get_communicator_class of a platform",
        Takes(f"{_COORDINATOR}.all_reduce", "self, input_"),
        Takes(f"{_COORDINATOR}.all_gather", "self, input_, dim=-1, output_tensor_list=None"),
        InOrder(f"{_COORDINATOR}.all_reduce", ("input_.is_cpu", "is_shm_available")),
    ),
    row(
        "PyNcclCommunicator",
        "replaces the class, so that collectives of GPUs in a group that spans nodes end in r2ccl",
        "SGLang calls get_communicator_class of a platform",
        Subclass(_NCCL),
        Takes(
            f"{_NCCL}.__init__",
            "self, group, device, library_path=None, is_symmetric_memory_enabled=False, "
            "cta_policy=None",
        ),
        Accepts(f"{_NCCL}.__init__", "self, group=, device=, is_symmetric_memory_enabled="),
        Takes(f"{_NCCL}.all_reduce", "self, tensor, op=ReduceOp.SUM"),
        Takes(f"{_NCCL}.outplace_all_reduce", "self, in_tensor, out_tensor=None, op=ReduceOp.SUM"),
        Takes(f"{_NCCL}.all_gather", "self, output_tensor, input_tensor, sizes=None"),
        Takes(
            f"{_NCCL}.reduce_scatter",
            "self, output_tensor, input_tensor, op=ReduceOp.SUM, sizes=None",
        ),
        Takes(f"{_NCCL}.all_to_all_single", "self, output_tensor, input_tensor"),
        Takes(f"{_NCCL}.broadcast", "self, tensor, src"),
        Takes(f"{_NCCL}.send", "self, tensor, dst"),
        Takes(f"{_NCCL}.recv", "self, tensor, src"),
        Takes(f"{_NCCL}.group_start", "self"),
        Takes(f"{_NCCL}.group_end", "self"),
        Takes(f"{_NCCL}.register_comm_window_raw", "self, ptr, size"),
        Takes(f"{_NCCL}.deregister_comm_window", "self, window"),
        Takes(f"{_NCCL}.change_state", "self, enable=None"),
        InOrder(
            f"{_COORDINATOR}._all_reduce_in_place",
            ("pynccl_comm.disabled", "pynccl_comm.all_reduce"),
        ),
    ),
    row(
        "get_local_ip_auto",
        "returns the address of SGLang's own traffic, so that rails do not use the management NIC",
        "",
        Accepts(f"{_SRT}.utils.network.get_local_ip_auto", ""),
        InOrder(f"{_SRT}.utils.network.get_local_ip_auto", ("'SGLANG_HOST_IP'", "'HOST_IP'")),
    ),
)

_STEP_ROWS = (
    row(
        "Scheduler.run_batch, process_batch_result",
        "reports begin and end of each step with its requests; checks that all ranks took part "
        "before tokens leave",
        "SGLang has a hook for steps",
        Takes(f"{_SCHEDULER}.run_batch", "self, batch, pp_proxy_tensors=None"),
        Takes(f"{_SCHEDULER}.process_batch_result", "self, batch, result"),
        InOrder(f"{_SCHEDULER}.run_batch", ("self.forward_ct", "batch.forward_iter")),
        Has(_SCHEDULER, ("forward_ct", "server_args")),
        Has(f"{_SRT}.managers.utils.GenerationBatchResult", ("copy_done",)),
        Has(_BATCH, ("extend_lens", "forward_iter", "forward_mode", "prefix_lens", "reqs", "copy")),
        Has(_REQUEST, ("finished", "origin_input_ids", "output_ids", "rid")),
        Has(f"{_SRT}.model_executor.forward_batch_info.ForwardMode", ("is_decode", "is_extend")),
        There(f"{_SRT}.constants.HEALTH_CHECK_RID_PREFIX", "'HEALTH_CHECK'"),
    ),
    row(
        "Scheduler.ingest_requests",
        "charges a stall of the broadcast of requests to all running requests",
        "SGLang has a hook for steps",
        Takes(f"{_SCHEDULER}.ingest_requests", "self, stop_at_pause=False"),
        Has(_SCHEDULER, ("running_batch",)),
    ),
    row(
        "Scheduler.run_event_loop",
        "tells sidecars of an engine without rails, which is ready before its first request",
        "SGLang has a hook for the end of its start",
        Takes(f"{_SCHEDULER}.run_event_loop", "self"),
    ),
    row(
        "an exception ends the engine",
        "relied upon: a rank that loses a peer ends its node's processes",
        "",
        InOrder(
            f"{_SRT}.managers.scheduler.run_scheduler_process",
            ("scheduler.run_event_loop", "parent_process.send_signal", "signal.SIGQUIT"),
        ),
    ),
    row(
        "TokenizerManager._handle_batch_output",
        "reads the timings of each request as seen by the client",
        "SGLang's statistics name the request",
        Takes(f"{_MANAGER}._handle_batch_output", "self, recv_obj"),
        Has(_MANAGER, ("rid_to_state",)),
        Has(_STATS, ("created_time", "finished_time", "first_token_time")),
    ),
)

ROWS = (*_PLUGIN_ROWS, *_GROUP_ROWS, *_STEP_ROWS)
