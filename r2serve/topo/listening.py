"""The doctor's check of listening ports: how many are needed, how many are free, and their rule."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from r2serve.option import port_window
from r2serve.ports.addresses import family_of, socket_address
from r2serve.ports.info import PortInfo
from r2serve.topo import firewall
from r2serve.topo.checks import FAILURE, NOTE, OK, WARNING, Finding, Patient

_EXAMPLE = "R2CCL_PORTS=40000-40050"


def ports_suffice(patient: Patient) -> Iterator[Finding]:
    """Counts the ports: each process of the node needs one at each address of a rail."""
    needed, why = _processes(patient)
    views = [view for end in patient.node.ports for view in end.info().views()]
    addresses = list(dict.fromkeys(view.address for view in views))
    where = f"each of {len(addresses)} addresses" if len(addresses) != 1 else addresses[0]
    each = f"{needed} at {where} ({why})"
    window = port_window(patient.config.ports) if patient.config.ports else None
    if window is None:
        low, high = patient.kernel_ports
        yield Finding(
            OK,
            "ports",
            f"TCP rails listen on any free port from {low} to {high}, {each}; with a packet filter "
            f"set {_EXAMPLE} or a similar range",
        )
        return
    low, high = window
    count = high - low + 1
    text = f"R2CCL_PORTS={patient.config.ports}: {count} ports; needed: {each}"
    wider = f"R2CCL_PORTS={low}-{min(65535, low + max(2 * count, 2 * needed, 10) - 1)}"
    if count < needed:
        yield Finding(FAILURE, "ports", text, wider)
        return
    short = [
        f"{free} at {view.address} ({view.device or 'any port'})"
        for view in views
        if (free := patient.free_ports(view, window)) < needed
    ]
    if short:
        yield Finding(
            WARNING,
            "ports",
            f"{text}; free now: {', '.join(short)}",
            f"ss -ltn shows the listeners; end an earlier engine, or set {wider}",
        )
    nics = list(dict.fromkeys(end.device for end in patient.node.ports))
    rule = firewall.accepting(patient.rules, nics, window)
    yield Finding(NOTE, "ports", f"{text}. A packet filter must accept them", rule)
    if _overlap(window, patient.kernel_ports) and not _reserved(window, patient.reserved_ports):
        yield Finding(
            NOTE,
            "ports",
            f"outgoing connections of any program may occupy ports from {low} to {high}, because "
            "the kernel takes their ports from the same range",
            f"sysctl -w net.ipv4.ip_local_reserved_ports={low}-{high}",
        )


def free_ports(at: PortInfo, window: tuple[int, int]) -> int:
    """Returns the number of ports of a window where a listener of this process could bind now."""
    free = 0
    for port in range(window[0], window[1] + 1):
        with socket.socket(family_of(at.address), socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind(socket_address(at.address, port, at.device))
                trial.listen(1)
            except OSError:
                continue
            free += 1
    return free


def _processes(patient: Patient) -> tuple[int, str]:
    """Returns the number of processes that an engine has on this node, and the reason."""
    gpus = len(patient.node.gpus)
    if gpus > 1:
        return gpus, f"1 for each process, {gpus} GPUs"
    return 1, "1 for each process"


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]


def _reserved(window: tuple[int, int], reserved: str) -> bool:
    """Whether the kernel's list of reserved ports, as ``4000,5000-5010``, contains the window."""
    ranges = [part.partition("-") for part in reserved.split(",") if part]
    return any(
        int(first) <= window[0] and window[1] <= int(last or first) for first, _, last in ranges
    )
