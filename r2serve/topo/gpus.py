"""GPUs of this node, and the memory of their collectives' buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from r2serve import _core
from r2serve.config import Config
from r2serve.errors import R2cclError

OLDEST = (8, 0)
"""Compute capability of the oldest GPU with all instructions of the kernels."""
NO_KERNELS = "this build of r2serve has no GPU kernels: install r2serve where nvcc is in PATH"
HOST_ASSISTED = "pinned host memory"
DIRECT = "GPU memory (GPUDirect)"


@dataclass(frozen=True)
class Gpu:
    """A GPU with the CUDA driver's index and description."""

    index: int
    name: str
    compute_capability: str
    dma_buf: bool
    """True: a NIC can register the GPU's memory as a dma-buf."""
    buffers: str
    """Memory for staging of collectives; empty: none, so the GPU cannot be used."""
    why_not: str
    """Reason for missing buffers, or for buffers in host memory; empty: buffers in GPU memory."""


def look(config: Config, rdma: Sequence[str] = ()) -> tuple[tuple[Gpu, ...], str]:
    """Returns all GPUs of the driver, and ``ok`` or the reason for a missing driver.

    Args:
        rdma: names of the RDMA devices of this node's rails.
    """
    try:
        found = _core.gpus(config.cuda_library)
    except R2cclError as error:
        return (), str(error)
    return tuple(_gpu(index, each, config, rdma) for index, each in enumerate(found)), "ok"


def too_old(major: int, minor: int) -> str:
    """Returns an error text for a compute capability below :data:`OLDEST`; else empty."""
    if (major, minor) >= OLDEST:
        return ""
    right = ".".join(map(str, OLDEST))
    return f"the GPU has compute capability {major}.{minor}: it must be {right} or later"


def _gpu(index: int, of: dict[str, str | int], config: Config, rdma: Sequence[str]) -> Gpu:
    why_not = too_old(int(of["major"]), int(of["minor"]))
    if not why_not and not _core.has_kernels():
        why_not = NO_KERNELS
    buffers = "" if why_not else HOST_ASSISTED
    if not why_not:
        why_not = _why_not_direct(index, config, rdma)
        buffers = HOST_ASSISTED if why_not else DIRECT
    return Gpu(
        index=index,
        name=str(of["name"]),
        compute_capability=f"{of['major']}.{of['minor']}",
        dma_buf=bool(of["dma_buf"]),
        buffers=buffers,
        why_not=why_not,
    )


def _why_not_direct(index: int, config: Config, rdma: Sequence[str]) -> str:
    """Returns the reason why this node cannot use GPUDirect, else empty; ignores the peers."""
    if config.gpu_direct == "off":
        return "gpu_direct is off (R2CCL_GPU_DIRECT)"
    if config.checksum:
        return "checksums are on (R2CCL_CHECKSUM): the CPU computes them"
    if not rdma:
        return "no rail is RDMA"
    return _core.why_not_direct(config.cuda_library, index, rdma)
