"""Our replacements for classes of vLLM, supported releases, and helpers for rows."""

from __future__ import annotations

from collections.abc import Iterable

from r2serve.seams import Expectation, Row, Takes

# vLLM's platform class -> ours. A new entry adds a platform, with a communicator below.
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

# Attributes of CudaCommunicator for transports that would bypass r2ccl: the transports themselves,
# and the switches that enable a transport (OTHER_PATHS_WANTED).
OTHER_PATHS = (
    "pynccl_comm",
    "ca_comm",
    "qr_comm",
    "symm_mem_comm",
    "fi_ar_comm",
    "fi_pcie_ipc_ar_comm",
    "aiter_ar_comm",
)
OTHER_PATHS_WANTED = (
    "use_custom_allreduce",
    "use_torch_symm_mem",
    "use_flashinfer_allreduce",
    "use_flashinfer_pcie_ipc_allreduce",
    "use_aiter_allreduce",
    "use_aiter_ag_rs",
)

RELEASES = ("0.32.0", "0.33.0")
"""Releases of vLLM checked against the rows."""


def row(
    seam: str,
    purpose: str,
    exit_: str,
    *expects: Expectation,
    releases: tuple[str, ...] = RELEASES,
) -> Row:
    """Makes a row for every supported release of vLLM, or only for ``releases``."""
    return Row(seam, purpose, exit_, expects, releases)


def of_each(owners: Iterable[str], method: str, parameters: str) -> tuple[Expectation, ...]:
    """Expects the method with these parameters in each of several classes."""
    return tuple(Takes(f"{owner}.{method}", parameters) for owner in owners)
