"""Prediction whether a rail between two nodes can come up, without a connection to the peer."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress

from r2serve.ports.addresses import family_of, socket_address
from r2serve.topo.checks import Patient
from r2serve.topo.peer import End

_ANY_PORT = 9


def why_never_up(patient: Patient, own: End, other: End) -> tuple[str, str]:
    """Returns the reason why a rail can never come up, and the fix; empty: no reason is known."""
    if own.info().waits or other.info().waits:
        return "", ""
    ours, theirs = ipaddress.ip_address(own.address), ipaddress.ip_address(other.address)
    if ours.version != theirs.version:
        return (
            f"IPv{ours.version} and IPv{theirs.version} addresses cannot be connected",
            "give both ports addresses of the same family, or name ports in R2CCL_RAILS",
        )
    if theirs.is_loopback:
        return (
            f"{other.address} is a loopback address of {other.device or 'lo'}",
            "name ports with addresses of a network in R2CCL_RAILS",
        )
    if other.address in {address for nic in patient.node.nics for address in nic.addresses}:
        return (
            f"{other.address} is an address of this node, too: both ends need different addresses",
            f"ip address show dev {own.device}, on both nodes",
        )
    if why := patient.route(own, other):
        return (
            f"no route from {own.device} ({own.address}) to {other.address}: {why}",
            f"ip route get {other.address} oif {own.device}",
        )
    return "", ""


def route(own: End, other: End) -> str:
    """Returns why the kernel has no route from a port to an address; empty: a route exists.

    Sends nothing: the kernel looks up the route of a datagram socket in connect().
    """
    with socket.socket(family_of(own.address), socket.SOCK_DGRAM) as trial:
        try:
            if own.device and own.device != "lo":
                # Without the right, the source address alone chooses the port, as in the engine.
                with suppress(PermissionError):
                    trial.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, own.device.encode())
            trial.bind(socket_address(own.address, 0, own.device))
            trial.connect(socket_address(other.address, _ANY_PORT, own.device))
        except OSError as error:
            return error.strerror or str(error)
    return ""
