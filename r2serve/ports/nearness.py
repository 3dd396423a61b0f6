"""Rails near the GPU of a process: the order of use by small messages.

Ranks of a node would otherwise share the NIC that came up first. Each rank has a GPU, and begins
with the NIC nearest to it by PCIe. Ranks with equally near NICs begin with different ones.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from r2serve.ports import pci
from r2serve.ports.info import PortInfo, ProcessInfo
from r2serve.ports.pci import Function

_FASTEST = 10**9
"""Mbit/s of a port of unknown speed, in the order."""
_ADDRESS_BYTES = 32


def _loaded(library: str) -> Any:
    """Returns a library that this process has loaded already.

    Raises:
        OSError: the process has not loaded the library.
    """
    return ctypes.CDLL(library, mode=os.RTLD_NOLOAD)


def gpu_of_thread(library: str, load: Callable[[str], Any] = _loaded) -> Function | None:
    """Returns the GPU of the calling thread's CUDA context; None: no context, or no such device.

    Neither loads nor initialises the driver.

    Args:
        library: the CUDA driver (``R2CCL_CUDA_LIBRARY``).
    """
    device = ctypes.c_int()
    address = ctypes.create_string_buffer(_ADDRESS_BYTES)
    try:
        driver = load(library)
        if driver.cuCtxGetDevice(ctypes.byref(device)):
            return None
        if driver.cuDeviceGetPCIBusId(address, _ADDRESS_BYTES, device):
            return None
    except (OSError, AttributeError):  # not loaded, or a driver without these functions
        return None
    return pci.function(address.value.decode("ascii", "replace").lower())


def index_of(gpu: Function | None) -> int:
    """Returns the index of a GPU among the GPUs of this host, by PCI address; -1: none."""
    known = [each.address for each in pci.gpus()] if gpu else []
    return known.index(gpu.address) if gpu and gpu.address in known else -1


def distances_of(
    own: ProcessInfo, peer: ProcessInfo, pairs: Sequence[tuple[PortInfo, PortInfo]]
) -> list[int]:
    """Returns the place of each rail in the order of use by small messages, equal at both ends.

    Ports with control traffic come last. The other rails are ordered by the distances of both ports
    from the GPUs of their processes, then by speed. The order of equal rails begins at a rail
    chosen by the index of a GPU.

    Returns:
        0 for every rail if neither process has a GPU: any rail may be the first.
    """
    low, high = sorted((own, peer), key=lambda info: info.process)
    index = low.gpu if low.gpu >= 0 else high.gpu
    if index < 0:
        return [0] * len(pairs)
    keys = [_key(*pair) for pair in pairs]
    places = [0] * len(pairs)
    ordered: list[int] = []
    for _, group in groupby(sorted(range(len(pairs)), key=keys.__getitem__), keys.__getitem__):
        equal = list(group)
        first = index % len(equal)
        ordered += equal[first:] + equal[:first]
    for place, rail in enumerate(ordered):
        places[rail] = place
    return places


def _key(mine: PortInfo, theirs: PortInfo) -> tuple[bool, int, int]:
    speed = min(mine.mbit_s or _FASTEST, theirs.mbit_s or _FASTEST)
    return mine.shares_control or theirs.shares_control, mine.away + theirs.away, -speed
