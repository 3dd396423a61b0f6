"""Rows of :mod:`r2serve.engines.vllm.relies_on`: device communicators and the fusing pass."""

from __future__ import annotations

from r2serve.engines.vllm.classes import (
    COMMUNICATORS,
    OTHER_PATHS,
    OTHER_PATHS_WANTED,
    of_each,
    row,
)
from r2serve.seams import Accepts, Has, InOrder, Subclass, Takes, There

_GROUPS = "vllm.distributed.parallel_state"
_DEVICE = "vllm.distributed.device_communicators"
_BASE = f"{_DEVICE}.base_device_communicator.DeviceCommunicatorBase"
_CPU = f"{_DEVICE}.cpu_communicator.CpuCommunicator"
_CUDA = f"{_DEVICE}.cuda_communicator.CudaCommunicator"
_PASSES = "vllm.compilation.passes"
_MANAGER = f"{_PASSES}.pass_manager.PostGradPassManager"
_MATCHER = f"{_PASSES}.vllm_inductor_pass.VllmFusionPatternMatcherPass"
_PATTERN = f"{_PASSES}.vllm_inductor_pass.VllmPatternReplacement"
_PASS = f"{_PASSES}.vllm_inductor_pass.VllmInductorPass"

# Methods of a device communicator; r2serve overrides them for a group that spans nodes.
_COLLECTIVES = {
    "destroy": "self",
    "all_reduce": "self, input_",
    "all_gather": "self, input_, dim=-1",
    "all_gatherv": "self, input_, dim=0, sizes=None",
    "reduce_scatter": "self, input_, dim=-1",
    "reduce_scatterv": "self, input_, dim=-1, sizes=None",
    "reduce_scatterv_into_output": "self, input_, output, dim=-1, sizes=None",
    "gather": "self, input_, dst=0, dim=-1",
    "broadcast": "self, tensor, src=0",
    "send": "self, tensor, dst=None",
    "recv": "self, size, dtype, src=None",
}

COMMUNICATOR_ROWS = (
    row(
        "GroupCoordinator makes the communicator",
        "calls the constructor with these keywords; r2serve's __new__ chooses the class by whether "
        "the group spans nodes",
        "",
        InOrder(
            f"{_GROUPS}.GroupCoordinator.__init__",
            (
                "device_comm_cls",
                "cpu_group=",
                "device=",
                "device_group=",
                "unique_name=",
                "use_all2all=",
            ),
        ),
        Accepts(
            f"{_BASE}.__init__",
            "self, cpu_group, device, device_group, unique_name, use_all2all=, global_ranks=, "
            "global_world_size=",
        ),
        Takes(
            f"{_CPU}.__init__",
            "self, cpu_group, device=None, device_group=None, unique_name='', use_all2all=False",
        ),
        Takes(
            f"{_CUDA}.__init__",
            "self, cpu_group, device=None, device_group=None, unique_name='', global_ranks=None, "
            "global_world_size=None, tcp_store_group=None, use_all2all=False",
        ),
        Has(
            _BASE,
            (
                "all2all_manager",
                "cpu_group",
                "device",
                "rank_in_group",
                "use_all2all",
                "world_size",
            ),
        ),
        *(Subclass(base) for base in COMMUNICATORS),
    ),
    row(
        "collectives of a device communicator",
        "r2serve overrides every method for a group that spans nodes",
        "",
        *(
            expectation
            for method, parameters in _COLLECTIVES.items()
            for expectation in of_each(COMMUNICATORS, method, parameters)
        ),
    ),
    row(
        "other paths of CudaCommunicator",
        "disables every transport that would bypass r2ccl: the attribute is None or False",
        "a single method of vLLM chooses the transport",
        Has(
            _CUDA,
            (*OTHER_PATHS, *OTHER_PATHS_WANTED),
        ),
        InOrder(
            f"{_GROUPS}.GroupCoordinator.graph_capture",
            ("self.device_communicator", "CudaCommunicator"),
        ),
    ),
    row(
        "suspend, resume and checkpoints",
        "the engine calls these methods of every device communicator at sleep and wake-up",
        "",
        *(
            expectation
            for method in ("suspend", "resume", "checkpoint_prepare", "checkpoint_restore")
            for expectation in of_each(COMMUNICATORS, method, "self")
        ),
        InOrder(f"{_GROUPS}.suspend_device_comms", ("comm.suspend",)),
        InOrder(f"{_GROUPS}.resume_device_comms", ("comm.resume",)),
        InOrder(f"{_GROUPS}.checkpoint_prepare_distributed_state", ("comm.checkpoint_prepare",)),
        InOrder(f"{_GROUPS}.checkpoint_restore_distributed_state", ("comm.checkpoint_restore",)),
    ),
    row(
        "all2all_manager",
        "carries expert parallelism by all-gather and reduce-scatter; other back ends ask the "
        "manager for a handle, and this manager has none",
        "r2ccl has an all-to-all for experts",
        Accepts(f"{_DEVICE}.all2all.AgRsAll2AllManager.__init__", "self, cpu_group"),
        InOrder(
            "vllm.model_executor.layers.fused_moe.all2all_utils.maybe_make_prepare_finalize",
            ("get_ep_all2all_manager", "all2all_manager.get_handle"),
        ),
        Takes(f"{_DEVICE}.base_device_communicator.All2AllManagerBase.get_handle", "self, kwargs"),
    ),
    row(
        "supports_tensor_dict (CPU)",
        "makes pipeline stages on different nodes call send_tensor_dict of r2serve's communicator",
        "vLLM calls send_tensor_dict of every communicator",
        InOrder(
            f"{_GROUPS}.GroupCoordinator.__init__",
            ("self.device_communicator", "'supports_tensor_dict'"),
        ),
        Has(_CPU, ("dist_module", "supports_tensor_dict")),
        Takes(f"{_CPU}.send_tensor_dict", "self, tensor_dict, dst"),
        Takes(f"{_CPU}.recv_tensor_dict", "self, src"),
    ),
    row(
        "get_ip",
        "returns the address of vLLM's own traffic, so that its NIC is the last rail among equals",
        "",
        Accepts("vllm.utils.network_utils.get_ip", ""),
        There("vllm.envs.VLLM_HOST_IP"),
    ),
)

FUSION_ROWS = (
    row(
        "PostGradPassManager.configure",
        "puts r2serve's pass before vLLM's passes that fuse a norm with other operations",
        "vLLM lets a plugin register a pass",
        Subclass(_MANAGER),
        Takes(f"{_MANAGER}.configure", "self, config"),
        InOrder(
            f"{_MANAGER}.configure",
            ("self.passes", "NoOpEliminationPass", "AllReduceFusionPass"),
        ),
        Has(
            _MANAGER,
            ("fix_functionalization", "passes"),
        ),
        There(f"{_PASSES}.utility.noop_elimination.NoOpEliminationPass"),
        Accepts("vllm.config.set_current_vllm_config", "config, check_compile="),
        Has("vllm.platforms.current_platform", ("is_cuda_alike",)),
    ),
    row(
        "VllmFusionPatternMatcherPass",
        "replaces all-reduce, addition and RMSNorm by a single operation",
        "vLLM's own fusion calls the communicator",
        Subclass(_MATCHER),
        Accepts(f"{_MATCHER}.__init__", "self, config, name"),
        Takes(f"{_MATCHER}.__init__", "self, config, pass_name"),
        Takes(f"{_MATCHER}.__call__", "self, graph"),
        Takes(f"{_MATCHER}.uuid", "self"),
        Takes(f"{_MATCHER}.is_applicable_for_range", "self, compile_range"),
        Accepts(f"{_MATCHER}.register", "self, replacement"),
        Has(
            _MATCHER,
            ("_pattern_replacements", "matched_count", "model_dtype"),
        ),
        Subclass(_PATTERN, ("get_inputs", "pattern", "replacement")),
        Takes(f"{_PATTERN}.pattern", "self"),
        Takes(f"{_PATTERN}.replacement", "self"),
        Takes(f"{_PATTERN}.get_inputs", "self"),
        Accepts(f"{_PATTERN}.empty", "rows, columns, dtype="),
        Subclass(_PASS),
        Accepts(f"{_PASS}.__init__", "self, config"),
        There("vllm.config.VllmConfig"),
        Has("vllm.config.ModelConfig", ("dtype", "get_hidden_size", "hf_text_config")),
    ),
    row(
        "ranges of compilation",
        "ends a range at the row limit of the fused operation; vLLM computes the ranges after "
        "`check_and_update_config`, and keeps ends set there",
        "vLLM lets a pass set the end of a range",
        Has("vllm.config.CompilationConfig", ("compile_ranges_endpoints",)),
        Has("vllm.config.utils.Range", ("end", "start")),
        InOrder(
            "vllm.config.VllmConfig.__post_init__",
            ("current_platform.check_and_update_config", "self._set_compile_ranges"),
        ),
        InOrder(
            "vllm.config.VllmConfig._set_compile_ranges",
            (
                "self.scheduler_config.max_num_batched_tokens",
                "compilation_config.compile_ranges_endpoints",
                "sorted",
            ),
        ),
    ),
    row(
        "operations of the fused pattern",
        "reads the operations of the pattern, and the group of the collective",
        "vLLM's own fusion calls the communicator",
        Accepts("vllm.ir.ops.fused_add_rms_norm", "x, x_residual, weight, epsilon"),
        Accepts("vllm.distributed.tensor_model_parallel_all_reduce", "input_"),
        Accepts("vllm.distributed.get_tp_group", ""),
        Has(f"{_GROUPS}.GroupCoordinator", ("device_communicator", "unique_name")),
        There(f"{_GROUPS}._groups"),
        Accepts(
            "vllm.utils.torch_utils.direct_register_custom_op",
            "op_name=, op_func=, fake_impl=, target_lib=",
        ),
    ),
)
