"""The management address of this node, from variables of the engine."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from collections.abc import Sequence

from r2serve.errors import ConfigError
from r2serve.ports.addresses import listing, parse
from r2serve.ports.explicit import find
from r2serve.ports.identity import local_address_towards
from r2serve.ports.info import ProcessInfo
from r2serve.ports.interfaces import Interface, list_interfaces
from r2serve.ports.without_netlink import list_interfaces_by_ioctl
from r2serve.variables import MANAGEMENT

_LOG = logging.getLogger("r2serve.r2ccl")
VARIABLES = ("VLLM_HOST_IP", "SGLANG_HOST_IP")
"""Variables of engines, the first of which counts."""
_NAMES = (*VARIABLES, "HOST_IP")
"""Variables that a plugin may pass on as an argument."""
MASTER = "MASTER_ADDR"


class HostAddressError(ConfigError):
    """A variable names an address that this node does not carry, or no address."""

    def __init__(self, text: str, addresses: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.addresses = tuple(addresses)
        """Numeric addresses of the wrong value; empty: it was not resolved."""


def find_management_address(argument: str | None = None) -> str | None:
    """Returns this node's management address in numeric form; None: unknown.

    The first of these counts: ``argument``, the real address of a node behind a relay,
    ``VLLM_HOST_IP``, ``SGLANG_HOST_IP``, this node's address on the route to ``MASTER_ADDR``. Host
    names are resolved.

    Raises:
        HostAddressError: names the variable, the value, and the addresses of this node.
    """
    value = argument or next(filter(None, map(os.environ.get, (MANAGEMENT, *VARIABLES))), None)
    if value:
        named = (name for name in _NAMES if os.environ.get(name) == value)
        variable = next(named, f"management_address ({', '.join(VARIABLES)})")
        return own_address(variable, value, _interfaces())
    master = os.environ.get(MASTER)
    if not master:
        return None
    _resolve(MASTER, master, "an address or a host name that this node can resolve", ())
    return local_address_towards(master)


def own_address(variable: str, value: str, interfaces: Sequence[Interface]) -> str:
    """Returns the numeric address of this node behind an address or a host name.

    Raises:
        HostAddressError: see :func:`find_management_address`.
    """
    right = "an address of this node, or a name of such an address"
    numeric = parse(value.split("%")[0])
    candidates = [str(numeric)] if numeric else _resolve(variable, value, right, interfaces)
    here = [text for text in candidates if find(text, interfaces) is not None]
    if not here:
        resolved = "" if numeric else f", resolved to {', '.join(candidates)}"
        raise HostAddressError(
            f"{variable} is {value!r}{resolved}: must be {right}; this node has: "
            f"{listing(interfaces)}",
            candidates,
        )
    beyond = [text for text in here if not ipaddress.ip_address(text).is_loopback]
    if not beyond and not numeric:
        _LOG.warning(
            "%s is %r, resolved to %s: a loopback address, which other nodes cannot reach",
            variable,
            value,
            here[0],
        )
    return (beyond or here)[0]


def check_here(variable: str, value: str) -> None:
    """Checks that this node carries an address, or an address of a host name.

    Raises:
        HostAddressError: see :func:`find_management_address`.
    """
    own_address(variable, value, _interfaces())


def owner_of(error: BaseException, infos: Sequence[ProcessInfo | None]) -> str:
    """Returns a sentence about the rank with the address of the error; empty: no such rank."""
    if not isinstance(error, HostAddressError):
        return ""
    for rank, info in enumerate(infos):
        if info is None:
            continue
        for port in (*info.ports, *([info.control] if info.control else [])):
            for view in port.views():
                if view.address in error.addresses and not view.waits:
                    return f"; {view.address} is an address of rank {rank} (host {info.host})"
    return ""


def _resolve(variable: str, value: str, right: str, interfaces: Sequence[Interface]) -> list[str]:
    try:
        found = socket.getaddrinfo(value, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        there = f"; this node has: {listing(interfaces)}" if interfaces else ""
        reason = getattr(error, "strerror", None) or str(error)
        raise HostAddressError(
            f"{variable} is {value!r}, a name that cannot be resolved ({reason}): must be "
            f"{right}{there}"
        ) from error
    return list(dict.fromkeys(str(entry[4][0]).split("%")[0] for entry in found))


def _interfaces() -> list[Interface]:
    try:
        return list_interfaces()
    except OSError as error:
        _LOG.debug("no list of interfaces by netlink: %s", error)
        return list_interfaces_by_ioctl()
