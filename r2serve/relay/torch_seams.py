"""Listeners of torch at the virtual address of this node, so that the relay can mirror them.

Gloo listens at the address of an interface, and a TCPStore listens at every address. Two
subclasses listen at the virtual address instead: :func:`apply` puts them in place of torch's
classes. Objects of both kinds pass ``isinstance`` of either class.
"""

from __future__ import annotations

import errno
import logging
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from r2serve.relay.client import Carried, PortTakenError

if TYPE_CHECKING:
    from types import ModuleType

GLOO = "ProcessGroupGloo"
STORE = "TCPStore"
USERS = (
    "torch.distributed",
    "torch.distributed.distributed_c10d",
    "torch.distributed.rendezvous",
)
"""Modules of torch that construct groups of gloo and stores."""
ATTEMPTS = 16
"""Listeners made one after another, while a port is taken on another node."""
BACKLOG = 1024

_LOG = logging.getLogger("r2serve.relay")


def apply(carried: Carried, *further: str) -> None:
    """Puts the subclasses in place in torch's modules; imports torch.

    Another call does nothing for the same relay, and replaces the classes for a later relay.

    Args:
        further: modules with the name TCPStore, replaced there, too.
    """
    import torch.distributed as dist

    if not dist.is_available():
        return
    real_store = dist.TCPStore  # type: ignore[attr-defined]
    store = _ours(real_store, carried, _store_class)
    for name in (*USERS, *further):
        _replace(_module(name), STORE, store)
    if not dist.is_gloo_available():
        return
    from torch.distributed import distributed_c10d

    real_gloo = distributed_c10d.ProcessGroupGloo
    gloo = _ours(real_gloo, carried, _gloo_class)
    for name in USERS:
        _replace(_module(name), GLOO, gloo)


def withdraw(*further: str) -> None:
    """Puts torch's classes back after the end of the relay; ``further``: as of :func:`apply`."""
    for name in (*USERS, *further):
        module = sys.modules.get(name)
        for symbol in (STORE, GLOO):
            real = getattr(getattr(module, symbol, None), "r2serve_real", None)
            if real is not None:
                setattr(module, symbol, real)


def _module(name: str) -> ModuleType:
    """Returns a module; ``torch.distributed.rendezvous`` is also the name of a function."""
    __import__(name)
    return sys.modules[name]


def _replace(module: ModuleType, name: str, ours: type[Any]) -> None:
    if hasattr(module, name):
        setattr(module, name, ours)


def _ours(
    found: type[Any], carried: Carried, make: Callable[[type[Any], Carried], type[Any]]
) -> type[Any]:
    """Returns the subclass for this relay; ``found``: torch's class, or a subclass made before."""
    if getattr(found, "r2serve_carried", None) == carried:
        return found
    made = make(getattr(found, "r2serve_real", found), carried)
    made.r2serve_carried = carried
    return made


def _metaclass(real: type[Any]) -> type[Any]:
    """Returns a metaclass by which objects of ``real`` are instances of a subclass."""

    class AlsoReal(type(real)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, real)

    return AlsoReal


def _store_class(real: type[Any], carried: Carried) -> type[Any]:
    class CarriedStore(real, metaclass=_metaclass(real)):  # type: ignore[metaclass, misc]
        r2serve_real = real

        def __init__(
            self,
            host_name: str,
            port: int,
            world_size: int | None = None,
            is_master: bool = False,
            *args: Any,
            **options: Any,
        ) -> None:
            # Positional arguments after is_master end with the descriptor, which r2serve leaves.
            if is_master and carried.has(host_name) and options.get("master_listen_fd") is None:
                try:
                    listener = _listen_as_master(carried, host_name, port)
                except OSError as error:
                    # Stores of a process may share the server, which torch finds by its port.
                    if error.errno != errno.EADDRINUSE or not options.get("multi_tenant"):
                        raise
                else:
                    port = listener.getsockname()[1]
                    options["master_listen_fd"] = listener.detach()
            super().__init__(host_name, port, world_size, is_master, *args, **options)

    CarriedStore.__name__ = CarriedStore.__qualname__ = STORE
    return CarriedStore


def _listen_as_master(carried: Carried, address: str, port: int) -> socket.socket:
    """Returns a listener at this node's virtual address whose mirrors exist.

    Raises:
        RuntimeError: the address belongs to another node.
        PortTakenError: the port is taken on another node.
        OSError: the port is taken here, or the relay is gone.
    """
    if address != carried.address:
        raise RuntimeError(
            f"TCPStore: {address} is the virtual address of another node; this node, "
            f"{carried.address}, cannot be the master"
        )
    for attempt in range(ATTEMPTS):
        listener = socket.create_server((address, port), backlog=BACKLOG)
        try:
            carried.sync()
        except PortTakenError as error:
            listener.close()
            if port or attempt + 1 == ATTEMPTS:
                raise
            _LOG.info("TCPStore: %s", error)
        except OSError:
            listener.close()
            raise
        else:
            return listener
    raise AssertionError("unreachable")


def _gloo_class(real: type[Any], carried: Carried) -> type[Any]:
    class CarriedGloo(real, metaclass=_metaclass(real)):  # type: ignore[metaclass, misc]
        r2serve_real = real

        def __init__(
            self,
            store: Any,
            rank: int,
            size: int,
            timeout: timedelta | Any | None = None,
            **keywords: Any,
        ) -> None:
            options = keywords.pop("options", None)
            if options is None and timeout is not None and not isinstance(timeout, timedelta):
                options, timeout = timeout, None
            if options is None:
                options = real._Options()
                if timeout is not None:
                    options._timeout = timeout
            # A group of one rank connects to nothing.
            options._devices = [_device(real, carried) if size > 1 else _local_device(real)]
            super().__init__(store, rank, size, options, **keywords)

    CarriedGloo.__name__ = CarriedGloo.__qualname__ = GLOO
    return CarriedGloo


def _device(real: type[Any], carried: Carried) -> Any:
    """Returns a device at the virtual address; its listener has mirrors before gloo tells its port.

    Raises:
        PortTakenError: several ports in a row are taken on another node.
        OSError: the relay is gone.
    """
    for attempt in range(ATTEMPTS):
        device = real.create_device(hostname=carried.address, lazy_init=False)
        try:
            carried.sync()
        except PortTakenError as error:
            if attempt + 1 == ATTEMPTS:
                raise
            _LOG.info("gloo: %s", error)
        else:
            return device
    raise AssertionError("unreachable")


def _local_device(real: type[Any]) -> Any:
    return real.create_device(hostname="127.0.0.1", lazy_init=False)
