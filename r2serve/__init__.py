"""Collectives that survive the loss of a NIC: serving continues when a rail dies mid-step.

``import r2serve`` is fast: the core, torch and NumPy load at the first use of a name.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from r2serve import cpus  # noqa: F401  records the CPUs before an engine pins a thread

if TYPE_CHECKING:
    from r2serve.communicator import Communicator
    from r2serve.config import Config
    from r2serve.device import DeviceCommunicator
    from r2serve.errors import (
        AbortedError,
        ConfigError,
        InternalError,
        InvalidArgumentError,
        OrderMismatchError,
        PeerClosedError,
        PeerLostError,
        R2cclError,
        StartupTimeoutError,
    )
    from r2serve.process import RailInfo

__all__ = [
    "AbortedError",
    "Communicator",
    "Config",
    "ConfigError",
    "DeviceCommunicator",
    "InternalError",
    "InvalidArgumentError",
    "OrderMismatchError",
    "PeerClosedError",
    "PeerLostError",
    "R2cclError",
    "RailInfo",
    "StartupTimeoutError",
    "__version__",
]

_HOME_OF = {
    "AbortedError": "r2serve.errors",
    "Communicator": "r2serve.communicator",
    "Config": "r2serve.config",
    "ConfigError": "r2serve.errors",
    "DeviceCommunicator": "r2serve.device",
    "InternalError": "r2serve.errors",
    "InvalidArgumentError": "r2serve.errors",
    "OrderMismatchError": "r2serve.errors",
    "PeerClosedError": "r2serve.errors",
    "PeerLostError": "r2serve.errors",
    "R2cclError": "r2serve.errors",
    "RailInfo": "r2serve.process",
    "StartupTimeoutError": "r2serve.errors",
}


_NEEDED_FOR_TENSORS = ("numpy", "torch")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("r2serve")
    if name in _HOME_OF:
        try:
            return getattr(import_module(_HOME_OF[name]), name)
        except ModuleNotFoundError as error:
            if error.name not in _NEEDED_FOR_TENSORS:
                raise
            from r2serve.errors import how_to_install

            text = f"r2serve.{name} needs the package {error.name}: {how_to_install('torch')}"
            raise ModuleNotFoundError(text, name=error.name) from error
    raise AttributeError(f"module 'r2serve' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
