"""Reads the first GPU of a CUDA driver by ctypes; uses only the standard library."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

# Numbers of CUdevice_attribute (cuda.h).
ATTRIBUTES = {
    "compute_capability_major": 75,
    "compute_capability_minor": 76,
    "compute_preemption": 90,
    "gpu_direct_rdma": 116,
    "flush_writes_options": 117,
    "gpu_direct_rdma_ordering": 118,
    "dma_buf": 124,
}


@dataclass(frozen=True)
class Gpu:
    """The first GPU of a driver."""

    name: str
    version: int | None
    """Latest CUDA release of the driver, 1000 * major + 10 * minor; None: unknown."""
    attributes: dict[str, int]
    """Values by the names of ATTRIBUTES, without those unknown to the driver."""


def first_gpu(library: str) -> Gpu | str:
    """Returns the first GPU of the driver `library`, or the reason why there is none."""
    try:
        cuda = ctypes.CDLL(library)
    except OSError as error:
        return f"no CUDA driver ({error})"
    code, number, device = cuda.cuInit(0), ctypes.c_int(), ctypes.c_int()
    if code:
        return f"a CUDA driver whose cuInit answers {code}"
    if cuda.cuDeviceGetCount(ctypes.byref(number)) or number.value == 0:
        return "a CUDA driver that shows no GPU"
    name = ctypes.create_string_buffer(256)
    if cuda.cuDeviceGet(ctypes.byref(device), 0) or cuda.cuDeviceGetName(name, 256, device):
        return "a CUDA driver whose first GPU does not answer"
    version = None
    if hasattr(cuda, "cuDriverGetVersion") and not cuda.cuDriverGetVersion(ctypes.byref(number)):
        version = number.value
    attributes = {}
    for attribute, code in ATTRIBUTES.items():
        if cuda.cuDeviceGetAttribute(ctypes.byref(number), code, device) == 0:
            attributes[attribute] = number.value
    return Gpu(name.value.decode(errors="replace"), version, attributes)
