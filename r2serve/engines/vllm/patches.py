"""What this plugin changes in vLLM and what it relies on there: the whole list.

Nothing of vLLM is patched.  The plugin goes through vLLM's own seams; the table says which, so
that a new vLLM release is checked against it (``tests/engines`` does).

=====================================  ============================================================
seam (vLLM 0.32)                       what for, and what would let it go
=====================================  ============================================================
``vllm.platform_plugins``              our platform class in place of vLLM's own, a subclass of it.
                                       Goes when vLLM lets a plugin name a communicator alone.
``pre_register_and_update``            adds the flag; without a parser: validates ``R2CCL_*``.
``check_and_update_config``            notes the choice in ``additional_config`` (part of the
                                       compile-cache key) and the workers a node, and puts our
                                       worker class, a subclass, in the place of vLLM's own.
``execute_model``, ``sample_tokens``   of the worker: which requests a step serves, and when it
                                       begins and ends.  Goes when a step has a hook.
``vllm.stat_logger_plugins``           what clients saw of each request.
``get_device_communicator_cls``        our communicator, a subclass of the platform's own.
``dist_backend`` (on CUDA)             our backend of torch.distributed for ``device_group`` of
                                       every group, where the engine spans nodes. Goes when a
                                       communicator may bring its group's.
``get_pass_manager_cls``               our compiler pass, before vLLM's own. On the CPU, with
                                       ``R2CCL_FUSE=on``, vLLM's mode of compilation is put back.
``use_custom_op_collectives``          True for groups that span nodes.  Relies on the order in
                                       ``GroupCoordinator.__init__``: it builds the communicator,
                                       then asks.  Goes when the question names the group.
``device_count`` (on CPU)              ``MessageQueue`` divides ranks by it to find out who shares
                                       a node; torch says 1, so vLLM asserts with two workers a
                                       node.  Goes when it divides by the local world size.
``supports_tensor_dict`` (on CPU)      makes pipeline stages on different nodes hand their tensors
                                       to ``send_tensor_dict`` of our communicator.
=====================================  ============================================================
"""

from __future__ import annotations

# vLLM's platform class -> ours. One line more covers a platform, once its communicator exists.
PLATFORMS = {
    "vllm.platforms.cpu.CpuPlatform": "r2serve.engines.vllm.platform.R2cclCpuPlatform",
    "vllm.platforms.zen_cpu.ZenCpuPlatform": "r2serve.engines.vllm.platform.R2cclZenCpuPlatform",
    "vllm.platforms.cuda.CudaPlatform": "r2serve.engines.vllm.platform.R2cclCudaPlatform",
}

# vLLM's device communicator -> ours.
COMMUNICATORS = {
    "vllm.distributed.device_communicators.cpu_communicator.CpuCommunicator": (
        "r2serve.engines.vllm.communicator.R2cclCpuCommunicator"
    ),
    "vllm.distributed.device_communicators.cuda_communicator.CudaCommunicator": (
        "r2serve.engines.vllm.cuda_communicator.R2cclCudaCommunicator"
    ),
}

# vLLM's worker class -> ours.
WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": "r2serve.engines.vllm.worker.R2cclCpuWorker",
    "vllm.v1.worker.gpu_worker.Worker": "r2serve.engines.vllm.worker.R2cclGpuWorker",
}

PASS_MANAGER = "r2serve.engines.vllm.fusion.R2cclPassManager"
