"""Pairs of ports on machines as they are: link-local wires, unnumbered ports, routes, speeds."""

from __future__ import annotations

import dataclasses
import ipaddress
import itertools
import json
import random
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from r2serve.errors import ConfigError
from r2serve.ports import wires
from r2serve.ports.choice import Choice, choose
from r2serve.ports.info import AddressInfo, PortInfo, ProcessInfo
from r2serve.ports.interfaces import Interface, Route
from r2serve.ports.pairing import lonely_ports, pair_ports, rails_between, unpaired
from r2serve.ports.rdma import Transport
from r2serve.ports.same_network import problems
from r2serve.ports.wires import Wire, ask, questions
from r2serve.process import Process

_NUMBERS = itertools.count(1)


def nic(
    name: str, *addresses: str, routes: tuple[Route, ...] | None = (), **facts: Any
) -> Interface:
    """Returns an interface; an address has a prefix, as `10.0.0.1/24`."""
    parsed = [ipaddress.ip_interface(each) for each in addresses]
    connected = tuple(Route(str(each.network)) for each in parsed)
    return Interface(
        name,
        next(_NUMBERS),
        addresses=tuple(each.ip for each in parsed),
        networks=tuple(str(each.network) for each in parsed),
        routes=None if routes is None else (*connected, *routes),
        **facts,
    )


def infos(choice: Choice, first: int = 40_000) -> tuple[PortInfo, ...]:
    return tuple(
        PortInfo.of(
            port,
            [Transport(why_tcp="none")] * len(port.addresses),
            [first + 10 * place + each for each in range(len(port.addresses))],
        )
        for place, port in enumerate(choice.ports)
    )


def machine(number: int, *interfaces: Interface, rails: str = "auto") -> ProcessInfo:
    ports = infos(choose(rails, "", None, interfaces))
    return ProcessInfo(
        number, bytes(32), f"node{number}", f"host{number}", ports, None, f"r2ccl-{number}"
    )


def joined(one: ProcessInfo, other: ProcessInfo, found: tuple[Wire, ...] = ()) -> list[str]:
    """Returns the rails between two machines, by devices and addresses."""
    there = rails_between(one, other, 0, wires=found)
    back = rails_between(other, one, 1, wires=found)
    for mine, theirs in zip(there, back, strict=True):
        assert mine["local_address"] == theirs["remote_address"]
        assert mine["remote_address"] == theirs["local_address"]
    return [
        f"{mine['device']}={mine['local_address']} - {theirs['device']}={theirs['local_address']}"
        for mine, theirs in zip(there, back, strict=True)
    ]


# ---- networks ----


def test_a_pair_has_a_common_network_before_a_route() -> None:
    one = machine(1, nic("a0", "10.1.0.1/24", "10.2.0.1/24"), nic("a1", "10.3.0.1/24"))
    other = machine(2, nic("b0", "10.3.0.2/24"), nic("b1", "10.2.0.2/24"))
    assert joined(one, other) == [
        "a0=10.2.0.1 - b1=10.2.0.2",
        "a1=10.3.0.1 - b0=10.3.0.2",
    ]


def test_a_port_joins_by_the_network_that_leaves_partners_for_the_others() -> None:
    """The first port could take either partner; the second port has no choice."""
    one = machine(1, nic("a0", "10.1.0.1/24", "10.2.0.1/24"), nic("a1", "10.1.0.9/24"))
    other = machine(2, nic("b0", "10.1.0.2/24"), nic("b1", "10.2.0.2/24"))
    assert joined(one, other) == ["a0=10.2.0.1 - b1=10.2.0.2", "a1=10.1.0.9 - b0=10.1.0.2"]


def test_a_pair_has_one_family() -> None:
    one = machine(1, nic("a0", "10.1.0.1/24", "fd01::1/64"), nic("a1", "10.2.0.1/24"))
    other = machine(2, nic("b0", "fd01::2/64"), nic("b1", "10.2.0.2/24", "fd02::2/64"))
    assert joined(one, other) == ["a0=fd01::1 - b0=fd01::2", "a1=10.2.0.1 - b1=10.2.0.2"]


def test_ports_of_equal_speed_join() -> None:
    one = machine(
        1, nic("a0", "10.1.0.1/24", mbit_s=25_000), nic("a1", "10.1.0.3/24", mbit_s=100_000)
    )
    other = machine(
        2, nic("b0", "10.1.0.2/24", mbit_s=100_000), nic("b1", "10.1.0.4/24", mbit_s=25_000)
    )
    assert set(joined(one, other)) == {
        "a0=10.1.0.1 - b1=10.1.0.4",
        "a1=10.1.0.3 - b0=10.1.0.2",
    }


def test_a_route_joins_ports_only_if_both_ends_have_it() -> None:
    there, back = Route("10.2.0.0/16", gateway=True), Route("10.1.0.0/16", gateway=True)
    one = machine(1, nic("a0", "10.1.0.1/24", routes=(there,)), nic("a1", "10.9.0.1/24"))
    other = machine(2, nic("b0", "10.2.0.1/24", routes=(back,)), nic("b1", "10.8.0.1/24"))
    assert joined(one, other) == ["a0=10.1.0.1 - b0=10.2.0.1"]
    assert unpaired(one, other) == {
        "a1": "a1 (10.9.0.1, no verbs) has no rail to host2: no common network (10.9.0.0/24 and "
        "10.2.0.0/24), and no route; no common network (10.9.0.0/24 and 10.8.0.0/24), and no route"
    }
    one_way = machine(3, nic("c0", "10.2.7.1/24"))
    with pytest.raises(ConfigError, match=r"no port of host1 reaches a port of host3: a0 \(10"):
        joined(one, one_way)
    unknown = machine(4, nic("d0", "10.2.8.1/24", routes=None))
    assert joined(one, unknown) == ["a0=10.1.0.1 - d0=10.2.8.1"]


def test_the_same_address_at_both_ends_makes_no_rail() -> None:
    one, other = (
        machine(number, nic("nat", "10.0.2.15/24"), nic("lan", f"10.1.0.{number}/24"))
        for number in (1, 2)
    )
    assert joined(one, other) == ["lan=10.1.0.1 - lan=10.1.0.2"]
    assert "both ends have the address 10.0.2.15" in unpaired(one, other)["nat"]


def test_more_ports_on_a_node_share_the_ports_of_the_other() -> None:
    one = machine(1, *(nic(f"a{place}", f"10.1.0.1{place}/24") for place in range(5)))
    other = machine(2, *(nic(f"b{place}", f"10.1.0.2{place}/24") for place in range(2)))
    assert [rail.split(" - ")[1] for rail in joined(one, other)] == [
        "b0=10.1.0.20",
        "b1=10.1.0.21",
        "b0=10.1.0.20",
        "b1=10.1.0.21",
        "b0=10.1.0.20",
    ]


def test_three_nodes_in_a_triangle_have_a_rail_each() -> None:
    one = machine(1, nic("p0", "10.0.12.1/30"), nic("p1", "10.0.13.1/30"))
    two = machine(2, nic("p0", "10.0.12.2/30"), nic("p1", "10.0.23.1/30"))
    three = machine(3, nic("p0", "10.0.13.2/30"), nic("p1", "10.0.23.2/30"))
    assert joined(one, two) == ["p0=10.0.12.1 - p0=10.0.12.2"]
    assert joined(one, three) == ["p1=10.0.13.1 - p0=10.0.13.2"]
    assert joined(two, three) == ["p1=10.0.23.1 - p1=10.0.23.2"]


def test_a_port_without_a_rail_to_any_node_is_told_as_useless() -> None:
    one = machine(1, nic("p0", "10.0.12.1/30"), nic("p1", "10.0.13.1/30"), nic("p2", "10.8.0.1/24"))
    two = machine(2, nic("p0", "10.0.12.2/30"))
    three = machine(3, nic("p0", "10.0.13.2/30"))
    told = lonely_ports(one, [one, two, three])
    assert {(useless, why.split()[0], why.split("to ")[1][:5]) for useless, why in told} == {
        (False, "p0", "host3"),
        (False, "p1", "host2"),
        (True, "p2", "host2"),
    }
    (warning,) = [why for useless, why in told if useless]
    assert warning.endswith("; nor to 1 other host")
    again = dataclasses.replace(two, process=4)  # another rank of the same node
    assert len(lonely_ports(one, [one, two, again, three])) == len(told)
    assert lonely_ports(one, [one]) == []
    spare = machine(4, nic("p0", "10.0.12.1/30"), nic("wg0", "10.8.0.1/24", kind="wireguard"))
    assert [useless for useless, _ in lonely_ports(spare, [two])] == [False]


def test_only_the_first_rank_of_a_node_warns_of_a_port_without_a_rail(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = machine(1, nic("p0", "10.0.12.1/30"), nic("p2", "10.8.0.1/24"))
    second = dataclasses.replace(one, process=3)
    peers = [one, second, machine(2, nic("p0", "10.0.12.2/30"))]
    levels = []
    for rank in (one, second):
        caplog.clear()
        with caplog.at_level("INFO", "r2serve.r2ccl"):
            Process.tell_unpaired(SimpleNamespace(info=rank), peers, ())  # type: ignore[arg-type]
        levels.append([record.levelname for record in caplog.records])
    assert levels == [["WARNING"], ["INFO"]]


# ---- wires ----


def wire(one: str, other: str) -> Wire:
    first, second = sorted((one, other))
    return first, second


LOCAL = [
    machine(1, nic("p0", "169.254.11.1/16"), nic("p1", "169.254.33.1/16")),
    machine(2, nic("p0", "169.254.22.2/16"), nic("p1", "169.254.44.2/16")),
]
STRAIGHT = (
    wire("node1/p0/169.254.11.1", "node2/p0/169.254.22.2"),
    wire("node1/p1/169.254.33.1", "node2/p1/169.254.44.2"),
)
CROSSED = (
    wire("node1/p0/169.254.11.1", "node2/p1/169.254.44.2"),
    wire("node1/p1/169.254.33.1", "node2/p0/169.254.22.2"),
)


def test_link_local_ports_join_along_their_wires() -> None:
    assert joined(*LOCAL, STRAIGHT) == [
        "p0=169.254.11.1 - p0=169.254.22.2",
        "p1=169.254.33.1 - p1=169.254.44.2",
    ]
    assert joined(*LOCAL, CROSSED) == [
        "p0=169.254.11.1 - p1=169.254.44.2",
        "p1=169.254.33.1 - p0=169.254.22.2",
    ]


def test_a_wire_without_an_answer_may_come_up_later() -> None:
    straight = [
        "p0=169.254.11.1 - p0=169.254.22.2",
        "p1=169.254.33.1 - p1=169.254.44.2",
    ]
    assert joined(*LOCAL, STRAIGHT[:1]) == straight
    assert joined(*LOCAL, CROSSED[:1]) == [
        "p0=169.254.11.1 - p1=169.254.44.2",
        "p1=169.254.33.1 - p0=169.254.22.2",
    ]
    assert joined(*LOCAL, ()) == straight


def test_link_local_nodes_in_a_triangle_have_a_rail_each() -> None:
    third = machine(3, nic("p0", "169.254.5.3/16"), nic("p1", "169.254.6.3/16"))
    one, two = LOCAL
    cables = (
        wire("node1/p0/169.254.11.1", "node2/p0/169.254.22.2"),
        wire("node1/p1/169.254.33.1", "node3/p0/169.254.5.3"),
        wire("node2/p1/169.254.44.2", "node3/p1/169.254.6.3"),
    )
    assert joined(one, two, cables) == ["p0=169.254.11.1 - p0=169.254.22.2"]
    assert joined(one, third, cables) == ["p1=169.254.33.1 - p0=169.254.5.3"]
    assert joined(two, third, cables) == ["p1=169.254.44.2 - p1=169.254.6.3"]
    assert unpaired(one, two, cables) == {
        "p1": "p1 (169.254.33.1, no verbs) has no rail to host2: no answer over this port"
    }


def test_equal_addresses_on_other_wires_of_a_triangle_are_no_answer() -> None:
    """Each cable has the addresses 169.254.1.1 and 169.254.1.2 at its ends."""
    one = machine(1, nic("p0", "169.254.1.1/16"), nic("p1", "169.254.1.2/16"))
    two = machine(2, nic("p0", "169.254.1.2/16"), nic("p1", "169.254.1.1/16"))
    three = machine(3, nic("p0", "169.254.1.1/16"), nic("p1", "169.254.1.2/16"))
    cables = (
        wire("node1/p0/169.254.1.1", "node2/p0/169.254.1.2"),
        wire("node2/p1/169.254.1.1", "node3/p1/169.254.1.2"),
        wire("node3/p0/169.254.1.1", "node1/p1/169.254.1.2"),
    )
    asked = questions([one, two, three])
    assert {*cables} <= {each.wire for each in asked}
    assert len({each.wire for each in asked}) == len(asked)
    assert joined(one, two, cables) == ["p0=169.254.1.1 - p0=169.254.1.2"]
    assert joined(two, three, cables) == ["p1=169.254.1.1 - p1=169.254.1.2"]
    assert joined(one, three, cables) == ["p1=169.254.1.2 - p0=169.254.1.1"]


def test_one_link_local_port_at_each_end_needs_no_probe() -> None:
    one = machine(1, nic("rj45", "192.168.50.1/24"), nic("qsfp", "169.254.11.1/16"))
    other = machine(2, nic("rj45", "192.168.50.2/24"), nic("qsfp", "169.254.22.2/16"))
    assert questions([one, other]) == []
    assert joined(one, other) == [
        "qsfp=169.254.11.1 - qsfp=169.254.22.2",
        "rj45=192.168.50.1 - rj45=192.168.50.2",
    ]


def test_each_pair_of_nodes_is_probed_once() -> None:
    ranks = [
        dataclasses.replace(info, process=10 * info.process + rank)
        for info in LOCAL
        for rank in (0, 1)
    ]
    asked = questions(ranks)
    assert {(each.asking, each.answering) for each in asked} == {(2, 0)}
    assert {each.wire for each in asked} == {*STRAIGHT, *CROSSED}


def test_a_probe_finds_the_listener_and_ends_without_an_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        open_port = listener.getsockname()[1]
        own = PortInfo("", "127.0.0.1", 0)
        there = PortInfo("", "127.0.0.1", open_port)
        with socket.create_server(("127.0.0.2", 0)) as closed:
            refused = PortInfo("", "127.0.0.2", closed.getsockname()[1])
        absent = PortInfo("no-such-dev0", "127.0.0.1", 0)
        asked = [
            wires.Question(1, 0, own, there),
            wires.Question(1, 0, own, refused),
            wires.Question(1, 0, absent, there),
        ]
        assert ask(asked, 60.0) == [asked[0].wire]
    assert ask([]) == []


def test_probes_end_once_every_port_has_a_wire_of_its_own() -> None:
    asked = questions(LOCAL)
    assert wires._all_joined(asked, STRAIGHT)
    assert wires._all_joined(asked, CROSSED)
    assert wires._all_joined(asked, (*STRAIGHT, *CROSSED))
    assert not wires._all_joined(asked, STRAIGHT[:1])
    assert not wires._all_joined(asked, (STRAIGHT[0], CROSSED[0])), "p1 of the first node is open"


# ---- addresses of the host, on unnumbered ports ----

FABRIC = Route("10.9.0.2/32", gateway=True, source="10.9.0.1")


def unnumbered(number: int, **changes: Any) -> list[Interface]:
    lo = nic("lo", "127.0.0.1/8", f"10.9.0.{number}/32", loopback=True)
    far = Route("10.9.0.0/24", gateway=True, source=f"10.9.0.{number}")
    return [
        lo,
        nic("lan0", f"fe80::{number}/64", routes=(far,), **changes),
        nic("lan1", f"fe80::1{number}/64", routes=(far,), **changes),
        # A container's port: a route without a gateway.
        nic("cali0", "fe80::ecee/64", routes=(Route("10.244.0.7/32"),), kind="veth"),
    ]


@pytest.mark.parametrize("rails", ["auto", "lan0,lan1", "lo", "10.9.0.1", "lo=10.9.0.1"])
def test_an_address_of_the_host_makes_a_rail_for_each_unnumbered_port(rails: str) -> None:
    ports = choose(rails, "", None, unnumbered(1)).ports
    assert [(port.device, port.address, port.borrowed) for port in ports] == [
        ("lan0", "10.9.0.1", True),
        ("lan1", "10.9.0.1", True),
    ]
    one, other = machine(1, *unnumbered(1), rails=rails), machine(2, *unnumbered(2))
    found = (
        wire("node1/lan0/10.9.0.1", "node2/lan0/10.9.0.2"),
        wire("node1/lan1/10.9.0.1", "node2/lan1/10.9.0.2"),
    )
    assert {each.wire for each in questions([one, other])} > {*found}
    assert joined(one, other, found) == [
        "lan0=10.9.0.1 - lan0=10.9.0.2",
        "lan1=10.9.0.1 - lan1=10.9.0.2",
    ]
    assert [rail["unnumbered"] for rail in rails_between(one, other, 0, wires=found)] == [True] * 2


def test_without_the_right_to_bind_an_address_of_the_host_is_one_rail() -> None:
    why = "SO_BINDTODEVICE on lan1: Operation not permitted; needs Linux 5.7 or CAP_NET_RAW"
    choice = choose("auto", "", None, unnumbered(1), denied=lambda _: why)
    assert [(port.device, port.address) for port in choice.ports] == [("", "10.9.0.1")]
    assert choice.warnings == (
        f"lan1 is no rail of its own: it shares 10.9.0.1 with other ports, and {why}",
    )
    local = [nic("p0", "169.254.1.1/16"), nic("p1", "169.254.2.1/16")]
    choice = choose("auto", "", None, local, denied=lambda _: why)
    assert [port.device for port in choice.ports] == ["p0", "p1"]
    assert choice.warnings == (f"rails over p1 may use another port: {why}",)


# ---- reserves ----


def reserves(*interfaces: Interface) -> dict[str, str]:
    return {
        port.device: port.reserve
        for port in choose("auto", "", None, interfaces).ports
        if port.reserve
    }


def test_slow_ports_wifi_and_overlays_are_reserves() -> None:
    assert reserves(
        nic("ib0", "10.0.0.1/24", mbit_s=200_000),
        nic("eth0", "10.1.0.1/24", mbit_s=25_000),
        nic("eth1", "10.2.0.1/24", mbit_s=24_999),
        nic("eth2", "10.3.0.1/24"),  # an unknown speed is no reason
        nic("wlan0", "10.4.0.1/24", wireless=True),
        nic("wg0", "10.5.0.1/24", kind="wireguard"),
        nic("cilium_host", "10.7.0.1/32", kind="veth", inner=True),
        nic("flannel.1", "10.6.0.0/32", kind="vxlan"),
    ) == {
        "eth1": "below 1/8 of the fastest port",
        "wlan0": "Wi-Fi",
        "wg0": "a wireguard overlay",
        "cilium_host": "a veth pair inside this node",
        "flannel.1": "a vxlan overlay",
    }
    # The speed of a reserve makes no other port slow.
    assert reserves(
        nic("wg0", "10.5.0.1/24", kind="wireguard", mbit_s=100_000),
        nic("eth0", "10.1.0.1/24", mbit_s=1000),
    ) == {"wg0": "a wireguard overlay"}


def test_rails_over_one_unit_are_told_to_the_core() -> None:
    def port(device: str, address: str, unit: str) -> PortInfo:
        return PortInfo(device, address, 1, network="10.0.0.0/24", unit=unit)

    own = [port(f"mv{place}", f"10.0.0.{place}", "eth0") for place in (1, 2)]
    own.append(port("eth1", "10.0.0.3", "eth1"))
    peer = [port(f"e{place}", f"10.0.0.1{place}", f"e{place}") for place in (0, 1)]
    assert [rail["unit"] for rail in rails_between(process(1, *own), process(2, *peer), 0)] == [
        "eth0",
        "eth0",
        "",
    ]
    # Seen from the peer, the first and the third rail leave through the same port.
    assert [rail["unit"] for rail in rails_between(process(2, *peer), process(1, *own), 0)] == [
        "e0",
        "",
        "e0",
    ]
    one = [
        rail["unit"] for rail in rails_between(process(1, own[0], own[2]), process(2, peer[0]), 0)
    ]
    assert one == ["e0 of host2", "e0 of host2"]
    assert [rail["unit"] for rail in rails_between(process(1, own[0]), process(2, peer[0]), 0)] == [
        ""
    ]


def test_a_rail_is_a_reserve_if_either_end_is() -> None:
    fast, slow = (PortInfo("e", "10.0.0.1", 1), PortInfo("e", "10.0.0.2", 1, reserve=True))
    [rail] = rails_between(process(1, fast), process(2, slow), 0)
    assert rail["reserve"] is True
    [rail] = rails_between(
        process(1, fast), process(2, dataclasses.replace(slow, reserve=False)), 0
    )
    assert rail["reserve"] is False


def process(number: int, *ports: PortInfo) -> ProcessInfo:
    return ProcessInfo(number, bytes(32), f"node{number}", f"host{number}", ports, None, "")


# ---- what is told ----


def test_all_addresses_of_a_port_survive_the_store() -> None:
    port = PortInfo(
        "eth0",
        "10.0.0.1",
        4000,
        "mlx5_0",
        1,
        "10.0.0.0/24",
        "RoCE v2",
        gid="::ffff:10.0.0.1",
        others=(AddressInfo("fd00::1", 4001, "fd00::/64"),),
        mtu=9000,
        mbit_s=100_000,
        carrier=False,
        reserve=True,
        unit="eth0",
        routes=("0.0.0.0/0",),
    )
    sent = process(1, port)
    assert ProcessInfo.from_wire(json.loads(json.dumps(sent.to_wire()))) == sent
    first, second = port.views()
    assert (first.address, first.port, first.verbs_device) == ("10.0.0.1", 4000, "mlx5_0")
    assert (second.address, second.port, second.verbs_device) == ("fd00::1", 4001, "")


def test_verbs_decide_between_addresses_of_two_ports() -> None:
    """The IPv6 addresses have GIDs, the IPv4 addresses have none."""
    ends = [
        PortInfo(
            "eth0",
            f"10.0.0.{number}",
            1,
            "mlx5_0",
            1,
            "10.0.0.0/24",
            others=(AddressInfo(f"fd00::{number}", 2, "fd00::/64", fabric="RoCE v2"),),
        )
        for number in (1, 2)
    ]
    [rail] = rails_between(process(1, ends[0]), process(2, ends[1]), 0)
    assert (rail["kind"], rail["local_address"], rail["remote_port"]) == ("verbs", "fd00::1", 2)


def test_a_port_that_waits_for_its_address_joins_a_port_left_over() -> None:
    one = machine(1, nic("rail0", "10.1.0.1/24"), rails="rail0,rail1")
    other = machine(2, nic("rail0", "10.1.0.2/24"), nic("rail1", "10.2.0.2/24"))
    assert joined(one, other) == [
        "rail0=10.1.0.1 - rail0=10.1.0.2",
        "rail1=0.0.0.0 - rail1=10.2.0.2",
    ]


def waiting(network: str, **facts: Any) -> PortInfo:
    return PortInfo("eth9", "0.0.0.0", 1, network=network, why="no address so far", **facts)


def with_ports(number: int, *ports: PortInfo) -> ProcessInfo:
    return dataclasses.replace(machine(number), ports=ports)


def test_a_port_that_waits_joins_by_its_known_network() -> None:
    two = machine(2, nic("a", "10.1.0.2/24"), nic("b", "10.2.0.2/24"), nic("c", "10.3.0.2/24"))
    one = with_ports(1, *machine(1, nic("a", "10.1.0.1/24")).ports, waiting("10.3.0.0/24"))
    assert joined(one, two)[1:] == ["eth9=0.0.0.0 - c=10.3.0.2"]
    alone = with_ports(1, *machine(1, nic("a", "10.1.0.1/24")).ports, waiting("10.9.0.0/24"))
    assert [text for text in joined(alone, two) if "eth9" in text] == []


def test_a_port_found_without_an_address_makes_no_second_rail_of_a_port() -> None:
    here = machine(1, nic("a", "10.1.0.1/24"))
    there = machine(2, nic("a", "10.1.0.2/24"))
    found = with_ports(1, *here.ports, waiting("", found=True))
    assert joined(found, there) == ["a=10.1.0.1 - a=10.1.0.2"]
    assert lonely_ports(found, [there]) == [], "the start has told the port already"
    more = machine(2, nic("a", "10.1.0.2/24"), nic("b", "10.2.0.2/24"))
    [(useless, why)] = lonely_ports(more, [found])
    assert useless, "the unnamed port there may never get an address"
    assert why.startswith("b (10.2.0.2")
    assert "eth9 there: no address so far" in why
    named = with_ports(1, *here.ports, waiting(""))
    assert joined(named, there)[1:] == ["eth9=0.0.0.0 - a=10.1.0.2"]


def test_the_core_is_told_of_ports_that_do_not_work() -> None:
    here = machine(1, nic("a", "10.1.0.1/24"), nic("b", "10.2.0.1/24", carrier=False))
    there = machine(2, nic("a", "10.1.0.2/24"), nic("b", "10.2.0.2/24"))
    other = with_ports(2, *there.ports, waiting("", found=True))
    here = with_ports(1, *here.ports, waiting("", found=True))
    facts = [
        [(rail["told"], rail["late"], rail["dormant"]) for rail in rails_between(*ends, 0)]
        for ends in ((here, other), (other, here))
    ]
    assert facts[0] == [(False, False, False), (True, True, False), (True, True, True)]
    assert facts[1] == [(False, False, False), (False, True, False), (True, True, True)]


def test_nodes_without_a_port_that_works_are_named_with_each_reason() -> None:
    there = machine(2, nic("a", "10.1.0.2/24"))
    here = dataclasses.replace(with_ports(1, waiting("")), unused=("eth1 (down)",))
    for ends in ((here, there), (there, here)):
        with pytest.raises(
            ConfigError, match=r"on host1 .*eth9 \(no address so far\), eth1 \(down\)"
        ):
            rails_between(*ends, 0)


# ---- ports in one network ----


def same(network: str) -> list[tuple[str, str]]:
    return networks(nic("eth1", f"{network}.1/16"), nic("eth2", f"{network}.2/16"))


def networks(*interfaces: Interface) -> list[tuple[str, str]]:
    """Returns device and network of each address, as the start passes them on."""
    ports = choose("auto", "", None, interfaces).ports
    return [(port.device, each.network) for port in ports for each in port.addresses]


def test_settings_that_mix_up_ports_of_one_network_are_named() -> None:
    loose: dict[str, int] = {}
    careful = {"arp_ignore": 1, "rp_filter": 2}
    strict = {"arp_ignore": 1, "rp_filter": 1}
    [text] = problems(same("10.1.0"), lambda _, name: loose.get(name, 0))
    assert "eth1 and eth2 are in one network, 10.1.0.0/16" in text
    assert "arp_ignore" in text
    assert "arp_announce" in text
    assert problems(same("10.1.0"), lambda _, name: careful.get(name, 0)) == []
    [text] = problems(same("10.1.0"), lambda _, name: strict.get(name, 0))
    assert "rp_filter is 1" in text
    # A wire of its own has no other node that could be answered wrongly.
    assert problems(same("169.254.1"), lambda _, name: loose.get(name, 0)) == []
    [text] = problems(same("169.254.1"), lambda _, name: strict.get(name, 0))
    assert "rp_filter" in text
    assert problems([same("10.1.0")[0]], lambda *_: 0) == []
    second = networks(nic("a0", "10.1.0.1/24", "10.2.0.1/24"), nic("a1", "10.2.0.2/24"))
    [text] = problems(second, lambda _, name: loose.get(name, 0))
    assert "a0 and a1 are in one network, 10.2.0.0/24" in text
    # The next hops of unnumbered ports have IPv6 addresses, so no ARP is sent.
    assert problems(networks(*unnumbered(1)), lambda _, name: strict.get(name, 0)) == []
    assert problems(networks(*unnumbered(1)), lambda _, name: loose.get(name, 0)) == []


@pytest.mark.parametrize("seed", range(40))
def test_any_pair_of_machines_has_the_best_partners(seed: int) -> None:
    """The largest possible number of ports have a partner of their own in a common network."""
    chance = random.Random(seed)
    near, far = (
        [
            PortInfo(f"e{place}", f"10.{net}.{place}.{side}", 1, network=f"10.{net}.0.0/16")
            for place, net in enumerate(chance.choices(range(3), k=chance.randint(1, 4)))
        ]
        for side in (1, 2)
    )
    pairs = pair_ports(near, far)
    assert {low.device for low, _ in pairs} == {port.device for port in near}
    assert {high.device for _, high in pairs} == {port.device for port in far}
    ends = {(low.device, high.device) for low, high in pairs}
    assert len(ends) == len(pairs), "no rail twice"
    few, many = sorted((near, far), key=len)
    most = max(
        sum(one.network == other.network for one, other in zip(few, order, strict=True))
        for order in itertools.permutations(many, len(few))
    )
    assert sum(low.network == high.network for low, high in pairs) >= most
