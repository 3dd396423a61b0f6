"""Shared fate: which ports of a machine are one unit of redundancy, and which are independent."""

from __future__ import annotations

import dataclasses
import ipaddress

import pytest

from r2serve.ports.choice import choose
from r2serve.ports.interfaces import Interface
from r2serve.ports.rdma import RdmaPort
from r2serve.ports.telling import shared_fate, tell
from r2serve.ports.units import Unit, find_units


def nic(name: str, **facts: object) -> Interface:
    index = sum(map(ord, name))
    return Interface(name, index, **facts)  # type: ignore[arg-type]


def rdma(device: str, netdev: str, guid: str) -> RdmaPort:
    return RdmaPort(device, 1, "ACTIVE", "Ethernet", 100.0, 0, (), netdev, -1, "", False, guid)


def groups(interfaces: list[Interface], ports: list[RdmaPort] | None = None) -> list[list[str]]:
    """Returns the groups of interfaces with a unit in common."""
    by_unit: dict[str, list[str]] = {}
    for name, unit in find_units(interfaces, ports or []).items():
        by_unit.setdefault(unit.name, []).append(name)
    return sorted(sorted(members) for members in by_unit.values() if len(members) > 1)


SPARK = [
    nic("enp1s0f0np0", pci="0000:01:00.0", port_name="p0"),
    nic("enp1s0f1np1", pci="0000:01:00.1", port_name="p1"),
    nic("enP2p1s0f0np0", pci="0002:01:00.0", port_name="p0"),
    nic("enP2p1s0f1np1", pci="0002:01:00.1", port_name="p1"),
    nic("enP7s7", pci="0007:01:00.0"),
]
"""Two functions of one ConnectX-7 for each of two cages, and a port of another chip."""
CARD = [
    rdma("rocep1s0f0", "enp1s0f0np0", "a088:c203:0012:3456"),
    rdma("rocep1s0f1", "enp1s0f1np1", "a088:c203:0012:3456"),
    rdma("roceP2p1s0f0", "enP2p1s0f0np0", "a088:c203:0012:3456"),
    rdma("roceP2p1s0f1", "enP2p1s0f1np1", "a088:c203:0012:3456"),
]


@pytest.mark.parametrize(
    ("interfaces", "together"),
    [
        # VLANs and macvlans over one port, with and without the port itself.
        (
            [
                nic("eth0"),
                nic("eth0.7", kind="vlan", lower="eth0"),
                nic("mv1", kind="macvlan", lower="eth0"),
                nic("eth1"),
            ],
            [["eth0", "eth0.7", "mv1"]],
        ),
        # A VLAN over a VLAN.
        (
            [
                nic("eth0"),
                nic("eth0.7", kind="vlan", lower="eth0"),
                nic("q", kind="vlan", lower="eth0.7"),
            ],
            [["eth0", "eth0.7", "q"]],
        ),
        # A container's macvlans, whose port is in the host's namespace.
        (
            [
                nic("net1", kind="macvlan", lower="interface 3 of namespace 0"),
                nic("net2", kind="macvlan", lower="interface 3 of namespace 0"),
                nic("net3", kind="macvlan", lower="interface 4 of namespace 0"),
            ],
            [["net1", "net2"]],
        ),
        # Virtual functions and their physical function.
        (
            [
                nic("ens1f0", pci="0000:3b:00.0", port_name="p0"),
                nic("ens1f0v0", pci="0000:3b:00.2", parent_pci="0000:3b:00.0"),
                nic("ens1f1", pci="0000:3b:00.1", port_name="p1"),
                nic("ens2f0", pci="0000:5e:00.0"),
            ],
            [["ens1f0", "ens1f0v0"]],
        ),
        # Functions of one card whose driver names no ports.
        (
            [
                nic("eno1", pci="0000:18:00.0"),
                nic("eno2", pci="0000:18:00.1"),
                nic("eno3", pci="0000:19:00.0"),
            ],
            [["eno1", "eno2"]],
        ),
        # Two ports of one card, by name.
        (
            [
                nic("eno1", pci="0000:18:00.0", port_name="p0"),
                nic("eno2", pci="0000:18:00.1", port_name="p1"),
            ],
            [],
        ),
        # A breakout cable: two ports of one transceiver.
        (
            [
                nic("swp1s0", switch_id="a0b1", port_name="p1s0"),
                nic("swp1s1", switch_id="a0b1", port_name="p1s1"),
                nic("swp2", switch_id="a0b1", port_name="p2"),
                nic("other", switch_id="ffff", port_name="p2"),
            ],
            [["swp1s0", "swp1s1"]],
        ),
        (
            [nic("a", port_id="0011"), nic("b", port_id="0011"), nic("c", port_id="0012")],
            [["a", "b"]],
        ),
    ],
)
def test_ports_of_one_unit(interfaces: list[Interface], together: list[list[str]]) -> None:
    assert groups(interfaces) == together
    assert groups(interfaces[::-1]) == together


def test_two_functions_of_one_cage_are_one_unit_and_two_cages_are_two() -> None:
    units = find_units(SPARK, CARD)
    assert groups(SPARK, CARD) == [
        ["enP2p1s0f0np0", "enp1s0f0np0"],
        ["enP2p1s0f1np1", "enp1s0f1np1"],
    ]
    assert units["enp1s0f0np0"].card == units["enp1s0f1np1"].card != ""
    assert units["enP7s7"] == Unit("enP7s7")


def test_one_system_image_guid_without_names_of_ports_is_one_unit() -> None:
    bare = [dataclasses.replace(each, port_name="", pci="") for each in SPARK[:2]]
    assert groups(bare, CARD) == [["enp1s0f0np0", "enp1s0f1np1"]]
    other = [CARD[0], rdma("mlx5_9", "enp1s0f1np1", "a088:c203:0012:9999")]
    assert groups(bare, other) == []


@pytest.mark.parametrize(
    "interfaces",
    [
        # Nothing is known of the ports.
        [nic("eth0"), nic("eth1")],
        # Both ends of a veth pair, and two containers' veths.
        [nic("eth0", kind="veth"), nic("eth1", kind="veth")],
        # Cards in neighbouring slots, on one root complex.
        [nic("eth0", pci="0000:3b:00.0"), nic("eth1", pci="0000:3c:00.0")],
        # Empty attributes are no evidence.
        [nic("eth0", switch_id="", port_name="p0"), nic("eth1", switch_id="", port_name="p0")],
        [nic("eth0", switch_id="ab", port_name=""), nic("eth1", switch_id="ab", port_name="")],
        # A switch with ports of different names.
        [nic("lan1", switch_id="ab", port_name="p1"), nic("lan2", switch_id="ab", port_name="p2")],
    ],
)
def test_independent_ports_are_never_told_as_shared(interfaces: list[Interface]) -> None:
    assert groups(interfaces) == []
    units = find_units(interfaces)
    assert all(not unit.why and not unit.card for unit in units.values())


def with_address(own: Interface, number: int) -> Interface:
    return dataclasses.replace(
        own,
        addresses=(ipaddress.ip_address(f"10.{number}.0.1"),),
        networks=(f"10.{number}.0.0/24",),
    )


def test_the_start_says_what_fails_together(caplog: pytest.LogCaptureFixture) -> None:
    macvlans = [
        with_address(nic(f"mv{number}", kind="macvlan", lower="eth0"), number) for number in (1, 2)
    ]
    told = "mv1 and mv2 share the physical port eth0: one unit of redundancy"
    choice = choose("auto", "", None, [nic("eth0"), *macvlans])
    assert shared_fate(choice.ports) == [told]
    tell(choice)
    assert (caplog.records[-1].levelname, caplog.records[-1].getMessage()) == ("WARNING", told)
    with caplog.at_level("INFO"):
        tell(choose("auto", "", None, [nic("eth0"), *macvlans, with_address(nic("eth1"), 3)]))
    assert (caplog.records[-1].levelname, caplog.records[-1].getMessage()) == ("INFO", told)


def test_the_start_says_which_ports_share_a_card() -> None:
    ports = choose(
        "auto", "", None, [with_address(each, place) for place, each in enumerate(SPARK)], CARD
    ).ports
    assert shared_fate(ports) == [
        "enP2p1s0f0np0 and enp1s0f0np0 share the physical port enP2p1s0f0np0: one unit of "
        "redundancy",
        "enP2p1s0f1np1 and enp1s0f1np1 share the physical port enP2p1s0f1np1: one unit of "
        "redundancy",
        "enP2p1s0f0np0 and enP2p1s0f1np1 and enp1s0f0np0 and enp1s0f1np1 have cables of their own, "
        "but share one card (PCI 0000:01:00 and 0002:01:00)",
    ]
