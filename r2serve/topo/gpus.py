"""The GPUs of this node, and where the buffers of their collectives are."""

from __future__ import annotations

from dataclasses import dataclass

from r2serve import _core
from r2serve.config import Config
from r2serve.errors import R2cclError

OLDEST = 8
"""Compute capability, major, that the kernels are compiled for."""
HOST_ASSISTED = "pinned memory of the host"


@dataclass(frozen=True)
class Gpu:
    """As the CUDA driver numbers and describes it."""

    index: int
    name: str
    compute_capability: str
    dma_buf: bool
    """Its memory can be given to a NIC as a dma-buf."""
    buffers: str
    """Where collectives are staged; empty: nowhere."""
    why_not: str
    """Why there are none; else why they are not in the GPU's own memory."""


def look(config: Config) -> tuple[tuple[Gpu, ...], str]:
    """All GPUs that the driver shows, and ``ok`` or why there is no driver."""
    try:
        found = _core.gpus(config.cuda_library)
    except R2cclError as error:
        return (), str(error)
    return tuple(_gpu(index, each) for index, each in enumerate(found)), "ok"


def _gpu(index: int, of: dict[str, str | int]) -> Gpu:
    why_not = ""
    if int(of["major"]) < OLDEST:
        why_not = f"compute capability {OLDEST}.0 or later is needed"
    elif not _core.has_kernels():
        why_not = "r2serve was installed where nvcc is not in the path"
    return Gpu(
        index=index,
        name=str(of["name"]),
        compute_capability=f"{of['major']}.{of['minor']}",
        dma_buf=bool(of["dma_buf"]),
        buffers="" if why_not else HOST_ASSISTED,
        why_not=why_not or "r2serve does not use GPUDirect yet",
    )
