"""A port whose address takes no listener does not end a start."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable

import pytest

from r2serve.errors import InvalidArgumentError
from r2serve.ports.choice import Port, choose
from r2serve.ports.info import PortInfo
from r2serve.ports.interfaces import Interface
from r2serve.ports.listening import PortListeners
from r2serve.ports.rdma import Transport


def ports(*entries: tuple[str, list[str]]) -> tuple[Port, ...]:
    found = [
        Interface(
            name,
            index,
            addresses=tuple(map(ipaddress.ip_address, addresses)),
            networks=tuple(f"{text}/32" for text in addresses),
        )
        for index, (name, addresses) in enumerate(entries, 1)
    ]
    return choose("auto", "", None, found).ports


def listeners(refused: set[str], *, may_wait: bool = True) -> PortListeners:
    numbers = iter(range(40_000, 50_000))

    def listen(_kind: str, _device: str, address: str) -> int:
        if address in refused:
            raise InvalidArgumentError(f"cannot listen on {address}")
        return next(numbers)

    def transports(port: Port) -> list[Transport]:
        return [Transport(why_tcp="none")] * len(port.addresses)

    return PortListeners(listen, transports, may_wait)


def shown(found: list[PortInfo]) -> list[tuple[str, list[str]]]:
    return [(port.device, [view.address for view in port.views()]) for port in found]


def test_an_address_without_a_listener_is_left_out() -> None:
    found = listeners({"10.0.0.1"}).open(ports(("eth0", ["10.0.0.1", "10.0.1.1", "10.0.2.1"])))
    assert shown(found) == [("eth0", ["10.0.1.1", "10.0.2.1"])]
    assert [view.port for view in found[0].views()] == [40_000, 40_001]
    assert found[0].network == "10.0.1.1/32"


def test_a_port_without_any_listener_waits(caplog: pytest.LogCaptureFixture) -> None:
    two = ports(("eth0", ["10.0.0.1"]), ("eth1", ["10.0.1.1"]))
    with caplog.at_level(logging.WARNING, "r2serve.r2ccl"):
        found = listeners({"10.0.0.1"}).open(two)
    assert shown(found) == [("eth0", ["0.0.0.0"]), ("eth1", ["10.0.1.1"])]
    assert (found[0].waits, found[0].network) == (True, "10.0.0.1/32")
    [told] = [each.getMessage() for each in caplog.records]
    assert told == "eth0 is no rail yet: cannot listen on 10.0.0.1; it joins once it is ready"


REFUSED = {"10.0.0.1", "0.0.0.0"}


def refuse(found: Callable[[], list[PortInfo]], caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    assert shown(found()) == [("eth1", ["10.0.1.1"])]
    return [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]


def test_a_port_that_cannot_wait_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    two = ports(("eth0", ["10.0.0.1"]), ("eth1", ["10.0.1.1"]))
    expected = ["a port is no rail: cannot listen on 10.0.0.1"]
    assert refuse(lambda: listeners(REFUSED).open(two), caplog) == expected
    assert refuse(lambda: listeners({"10.0.0.1"}, may_wait=False).open(two), caplog) == expected


def test_a_start_without_any_listener_is_an_error_with_all_reasons() -> None:
    two = ports(("eth0", ["10.0.0.1"]), ("eth1", ["10.0.1.1"]))
    with pytest.raises(InvalidArgumentError, match=r"on 10\.0\.0\.1; .* on 10\.0\.1\.1"):
        listeners({"10.0.0.1", "10.0.1.1", "0.0.0.0"}).open(two)
    assert listeners(set()).open(()) == []


def test_ports_found_without_an_address_are_marked() -> None:
    later = choose("auto", "", None, [Interface("eth3", 3)]).later
    [port] = listeners(set()).open_later(later)
    assert (port.device, port.waits, port.found, port.why) == (
        "eth3",
        True,
        True,
        "no address so far",
    )
    assert listeners({"0.0.0.0"}).open_later(later) == []
    assert listeners(set(), may_wait=False).open_later(later) == []
