"""The doctor's check of the host's name, which gloo announces to other nodes.

Debian and Ubuntu map the name to 127.0.1.1 in /etc/hosts. gloo then tells other nodes this address,
unless GLOO_SOCKET_IFNAME names a device, and the start ends after minutes with ``connectFullMesh
failed … Connection refused``.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator

from r2serve.ports.management_address import VARIABLES
from r2serve.topo.checks import FAILURE, WARNING, Finding, HostName, Patient

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"


def look() -> HostName:
    """Returns the name of this host and its addresses; without addresses, it has none."""
    name = socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        found = []
    return HostName(
        name,
        tuple(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found)),
        tuple(filter(None, os.environ.get(GLOO_VARIABLE, "").split(","))),
        frozenset(device for _, device in socket.if_nameindex()),
        next(filter(None, map(os.environ.get, VARIABLES)), ""),
    )


def name_is_reachable(patient: Patient) -> Iterator[Finding]:
    """Reports a name that other nodes cannot use, unless gloo is given a device."""
    host = patient.host_name
    devices = [nic.name for nic in patient.node.nics if host.control in nic.addresses]
    device = devices[0] if host.control and devices else "DEVICE"
    fix = f"export {GLOO_VARIABLE}={device}" + (
        f", with the device of {' or '.join(VARIABLES)}" if device == "DEVICE" else ""
    )
    for missing in [each for each in host.gloo if each not in host.devices]:
        text = f"{GLOO_VARIABLE} names {missing!r}, and this node has no such device"
        yield Finding(FAILURE, "host name", text, fix)
    if host.gloo:
        return
    if not host.addresses:
        text = f"the host's name {host.name!r} cannot be resolved, and {GLOO_VARIABLE} is not set"
        yield Finding(WARNING, "host name", text, fix)
    elif all(ipaddress.ip_address(each).is_loopback for each in host.addresses):
        yield Finding(
            WARNING,
            "host name",
            f"the host's name {host.name!r} is {', '.join(host.addresses)}, and {GLOO_VARIABLE} is "
            "not set: gloo tells other nodes this loopback address",
            fix,
        )
