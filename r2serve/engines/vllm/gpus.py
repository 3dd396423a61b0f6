"""Checks of GPU, driver and this build of r2serve, at start and in a worker.

A process that starts an engine may fork workers later, and a child cannot use a driver initialised
before the fork. So :func:`check` initialises no driver: ``cuDriverGetVersion`` needs no
``cuInit``, and vLLM asks NVML for the compute capability.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from r2serve import _core
from r2serve.errors import ConfigError
from r2serve.topo.gpus import NO_KERNELS, too_old

OLDEST_DRIVER = (11, 0)
"""CUDA version of the first driver with PTX 7.0, the oldest image in a build of r2serve."""


class Version(NamedTuple):
    """A CUDA version or a compute capability."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


def check(library: str, capability: tuple[int, int] | None) -> None:
    """Refuses a GPU, driver or build on which workers would fail.

    Args:
        library: the CUDA driver: a file, or a name that the loader finds (``R2CCL_CUDA_LIBRARY``).
        capability: compute capability of the GPU; None: unknown.

    Raises:
        ConfigError: names the value found and the values allowed.
    """
    if not _core.has_kernels():
        raise ConfigError(
            f"--distributed-backend is 'r2ccl' for GPUs on several nodes, but {NO_KERNELS}, or use "
            "--distributed-backend default, without failover"
        )
    version = driver_version(library)
    if version < OLDEST_DRIVER:
        raise ConfigError(
            f"the CUDA driver (R2CCL_CUDA_LIBRARY: {library}) is of CUDA {version}: it must be of "
            f"CUDA {Version(*OLDEST_DRIVER)} or later"
        )
    if capability is not None and (old := too_old(*capability)):
        raise ConfigError(old)


def check_in_worker(library: str, ordinal: int) -> None:
    """Runs :func:`check` in a process with CUDA initialised.

    Args:
        library: the CUDA driver (``R2CCL_CUDA_LIBRARY``).
        ordinal: index of the GPU in the driver's order.

    Raises:
        ConfigError: names the value found and the values allowed.
    """
    check(library, None)
    gpu = _core.gpus(library)[ordinal]
    check(library, (int(gpu["major"]), int(gpu["minor"])))


def driver_version(library: str) -> Version:
    """Returns the latest CUDA version of a driver (cuDriverGetVersion); initialises nothing.

    Raises:
        ConfigError: no such driver, or a driver without a version.
    """
    name = f"cuda_library (R2CCL_CUDA_LIBRARY) is {library!r}"
    try:
        ask = ctypes.CDLL(library).cuDriverGetVersion
    except (OSError, AttributeError) as error:
        raise ConfigError(
            f"{name}, which is no CUDA driver here ({error}): it must be the file, or the name, of "
            "the driver's library, which comes with NVIDIA's driver"
        ) from error
    number = ctypes.c_int()
    code = ask(ctypes.byref(number))
    if code != 0 or number.value <= 0:  # 0: NVIDIA's stub library for linking
        raise ConfigError(
            f"{name}, whose cuDriverGetVersion answered {code} and version {number.value}: it must "
            "be the library of a running driver"
        )
    return Version(number.value // 1000, number.value % 1000 // 10)
