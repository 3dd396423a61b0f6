"""Listeners for the rails of a process's ports.

A port whose address takes no listener waits like a port without an address. The start goes on with
the other ports.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace

from r2serve.errors import R2cclError
from r2serve.ports.addresses import UNSPECIFIED, UNSPECIFIED_V6
from r2serve.ports.choice import Port
from r2serve.ports.info import PortInfo
from r2serve.ports.pci import Function
from r2serve.ports.rdma import Transport

_LOG = logging.getLogger("r2serve.r2ccl")


class PortListeners:
    """Opens the listeners of ports."""

    def __init__(
        self,
        listen: Callable[[str, str, str], int],
        transports_of: Callable[[Port], list[Transport]],
        may_wait: bool = True,
        gpu: Function | None = None,
    ) -> None:
        """Opens nothing.

        Args:
            listen: listens on kind, device and address, and returns the TCP port; may raise
                R2cclError.
            transports_of: returns the transport of each address of a port.
            may_wait: whether ports may join later; their rails use TCP.
            gpu: the GPU of this process; None: none, or unknown.
        """
        self._listen = listen
        self._transports_of = transports_of
        self._may_wait = may_wait
        self._gpu = gpu

    def open(self, ports: Sequence[Port]) -> list[PortInfo]:
        """Listens on ports; a port without any listener is told and left out.

        Raises:
            R2cclError: there are ports, and none of them has a listener.
        """
        found: list[PortInfo] = []
        refused: list[R2cclError] = []
        for port in ports:
            try:
                found.append(self._open(port))
            except R2cclError as error:
                refused.append(error)
        if refused and not found:
            raise type(refused[0])("; ".join(dict.fromkeys(map(str, refused))))
        for each in refused:
            _LOG.warning("a port is no rail: %s", each)
        return found

    def open_later(self, ports: Sequence[Port]) -> list[PortInfo]:
        """Prepares ports without a usable address so far, which no list names."""
        found: list[PortInfo] = []
        for port in ports if self._may_wait else ():
            try:
                found.append(replace(self._open(port), found=True))
            except R2cclError as error:
                _LOG.debug("%s will be no rail: %s", port.device, error)
        return found

    def _open(self, port: Port) -> PortInfo:
        transports = self._transports_of(port)
        device = PortInfo.of(port, transports).device
        heard: list[tuple[int, int]] = []  # place and TCP port of each address with a listener
        refused: list[R2cclError] = []
        for place, each in enumerate(port.addresses):
            try:
                heard.append((place, self._listen("tcp", device, each.address)))
            except R2cclError as error:
                refused.append(error)
        if not heard:
            return self._wait(port, device, refused[0])
        for why in refused:
            _LOG.debug("an address of %s takes no listener: %s", port.device, why)
        places = [place for place, _ in heard]
        return PortInfo.of(
            _with_addresses(port, places),
            [transports[place] for place in places],
            [number for _, number in heard],
            self._gpu,
        )

    def _wait(self, port: Port, device: str, refused: R2cclError) -> PortInfo:
        """Returns a port that waits until its address takes a listener.

        Raises:
            R2cclError: the port cannot wait.
        """
        if port.waits or not device or not self._may_wait:
            raise refused
        anywhere = UNSPECIFIED_V6 if port.family == socket.AF_INET6 else UNSPECIFIED
        waiting = replace(port, address=anywhere, others=(), waits=str(refused))
        try:
            number = self._listen("tcp", device, anywhere)
        except R2cclError as error:
            raise refused from error
        _LOG.warning("%s is no rail yet: %s; it joins once it is ready", device, refused)
        transport = Transport(why_tcp="the port has no listener so far")
        return PortInfo.of(waiting, [transport], [number], self._gpu)


def _with_addresses(port: Port, places: Sequence[int]) -> Port:
    """Returns the port with some of its addresses, by their places."""
    first, *others = [port.addresses[place] for place in places]
    return replace(
        port,
        address=first.address,
        network=first.network,
        borrowed=first.borrowed,
        family=socket.AF_INET6 if ":" in first.address else socket.AF_INET,
        others=tuple(others),
    )
