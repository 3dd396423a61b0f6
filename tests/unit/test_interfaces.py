"""Choice of interfaces as rails, syntax of explicit lists, and identity of nodes."""

from __future__ import annotations

import dataclasses
import ipaddress
import itertools
import os
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import Sequence

import pytest

from r2serve.errors import ConfigError
from r2serve.ports import interfaces, netlink
from r2serve.ports.addresses import socket_address
from r2serve.ports.choice import Port, choose, select_ports, unusable
from r2serve.ports.identity import node_identity
from r2serve.ports.interfaces import Interface, list_interfaces
from r2serve.ports.telling import not_used, tell


def interface(name: str, *addresses: str, **fields: object) -> Interface:
    index = sum(map(ord, name))
    parsed = tuple(map(ipaddress.ip_address, addresses))
    return Interface(name=name, index=index, addresses=parsed, **fields)  # type: ignore[arg-type]


LO = interface("lo", "127.0.0.1", "::1", loopback=True)
ETH0 = interface("eth0", "10.0.0.1", "fe80::1")
ETH1 = interface("eth1", "10.0.1.1")
ETH2 = interface("eth2", "10.0.2.1", "10.0.2.2", "fd00::2")
ETH10 = interface("eth10", "10.0.10.1")
HERE = [LO, ETH0, ETH1, ETH2]


def choose_ports(
    spec: str, management: str, management_address: str | None, there: Sequence[Interface]
) -> list[Port]:
    return list(choose(spec, management, management_address, there).ports)


def ends(ports: list[Port]) -> list[str]:
    return [f"{port.device}={port.address}" for port in ports]


def test_auto_takes_every_usable_nic_in_the_order_of_names() -> None:
    ports = choose_ports("auto", "", None, [LO, ETH10, ETH2, ETH0, ETH1])
    assert ends(ports) == ["eth0=10.0.0.1", "eth1=10.0.1.1", "eth2=10.0.2.1", "eth10=10.0.10.1"]
    assert [port.name for port in ports] == ["rail0", "rail1", "rail2", "rail3"]
    assert {port.family for port in ports} == {socket.AF_INET}


UNUSABLE = {
    "loopback": LO,
    "a bridge interface": interface("docker0", "172.17.0.1", kind="bridge"),
    "belongs to docker0": interface(
        "veth1", "10.9.0.1", kind="veth", master="docker0", master_kind="bridge"
    ),
    "belongs to bond0": interface("eth5", "10.9.0.2", master="bond0", master_kind="bond"),
    # A virtual function below a synthetic NIC: the master has no special kind.
    "belongs to eth0": interface("enP1", "10.9.0.3", master="eth0"),
    "a dummy interface": interface("loop1", "10.9.0.4", kind="dummy"),
    "down": interface("eth6", "10.9.0.5", up=False, carrier=False),
    "no carrier": interface("eth7", carrier=False),
    "no address": interface("eth9"),
    "no address except IPv6 link-local; R2CCL_RAILS may name the interface": interface(
        "eth8", "fe80::5"
    ),
}


@pytest.mark.parametrize("why", UNUSABLE)
def test_auto_leaves_out_unusable_interfaces(why: str) -> None:
    assert unusable(UNUSABLE[why]) == why
    assert ends(choose_ports("auto", "", None, [UNUSABLE[why], ETH1])) == ["eth1=10.0.1.1"]


@pytest.mark.parametrize(
    "usable",
    [
        interface("eth0", "10.0.0.1", kind="veth"),  # a container's NIC
        interface("bond0", "10.0.0.1", kind="bond"),
        interface("net1", "10.0.0.1", kind="macvlan"),
        interface("eth0", "10.0.0.1", master="blue", master_kind="vrf"),
        interface("eth0", "8.8.8.8"),
        interface("eth0", "100.64.0.1"),
        interface("enp1s0f0np0", "169.254.3.4", "fe80::5"),
        interface("eth7", "10.9.0.6", carrier=False),  # a cable may be plugged in later
        interface("tailscale0", "100.64.0.4", kind="tun"),
    ],
)
def test_auto_takes_interfaces_with_their_own_traffic(usable: Interface) -> None:
    assert unusable(usable) == ""


def test_auto_falls_back_to_ipv6() -> None:
    nic = interface("eth0", "fe80::1", "fd00::7", "2001:db8::7")
    (port,) = choose_ports("auto", "", None, [nic])
    assert (port.address, port.family) == ("fd00::7", socket.AF_INET6)


def test_a_socket_needs_the_device_of_an_ipv6_link_local_address() -> None:
    assert socket_address("10.0.0.1", 7, "lo") == ("10.0.0.1", 7)
    assert socket_address("fd00::7", 7, "lo") == ("fd00::7", 7, 0, 0)
    assert socket_address("fe80::1", 7, "lo") == ("fe80::1", 7, 0, socket.if_nametoindex("lo"))
    with pytest.raises(OSError, match="interface"):
        socket_address("fe80::1", 7, "no-such-dev0")


@pytest.mark.case("02", "the fast port left out, because VLLM_HOST_IP was there")
def test_the_port_with_control_traffic_is_a_rail_behind_equals() -> None:
    assert ends(choose_ports("auto", "", "10.0.0.1", HERE)) == [
        "eth1=10.0.1.1",
        "eth2=10.0.2.1",
        "eth0=10.0.0.1",
    ]
    fast = dataclasses.replace(ETH1, mbit_s=100_000)
    slow = dataclasses.replace(ETH0, mbit_s=25_000)
    ports = choose_ports("auto", "", "10.0.1.1", [LO, slow, fast])
    assert ends(ports) == ["eth1=10.0.1.1", "eth0=10.0.0.1"], "the fast port is never left out"
    assert [port.shares_control for port in ports] == [True, False]
    # Without a known speed (virtio), a port with control traffic comes last.
    ports = choose_ports("auto", "", "10.0.0.1", [LO, ETH0, fast, ETH2])
    assert [port.device for port in ports] == ["eth2", "eth1", "eth0"]


@pytest.mark.parametrize("address", ["127.0.0.1", "10.77.0.1", "head-node", "0.0.0.0", ""])
def test_a_management_address_without_a_nic_changes_no_order(address: str) -> None:
    assert ends(choose_ports("auto", "", address, HERE))[0] == "eth0=10.0.0.1"


@pytest.mark.parametrize("management", ["eth1", "10.0.1.1"])
def test_a_named_management_nic_is_never_a_rail(management: str) -> None:
    chosen = choose_ports("auto", management, "10.0.1.1", HERE)
    assert ends(chosen) == ["eth0=10.0.0.1", "eth2=10.0.2.1"]
    assert choose_ports("auto", management, None, [LO, ETH1]) == []


def test_a_missing_management_nic_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"R2CCL_MANAGEMENT.*'eth9'.*eth0=10\.0\.0\.1"):
        choose_ports("auto", "eth9", None, HERE)


def test_auto_without_any_nic_gives_no_rail() -> None:
    assert choose_ports("auto", "", None, [LO]) == []


def test_auto_logs_chosen_and_unused_interfaces(caplog: pytest.LogCaptureFixture) -> None:
    fast = dataclasses.replace(ETH0, mbit_s=100_000)
    slow = dataclasses.replace(ETH1, mbit_s=25_000)
    with caplog.at_level("INFO", logger="r2serve.ports.telling"):
        tell(choose("auto", "eth0", "10.0.0.1", [LO, fast, slow]))
    told = "eth0 (management (R2CCL_MANAGEMENT), 100 Gbit/s)"
    assert f"rails: eth1 (10.0.1.1, 25 Gbit/s); not used: lo (loopback), {told}" in caplog.text
    [warning] = [each for each in caplog.records if each.levelname == "WARNING"]
    assert warning.getMessage() == (
        "eth0, 100 Gbit/s is no rail, although it is faster than a port in use: "
        "management (R2CCL_MANAGEMENT)"
    )
    caplog.clear()
    tell(choose("auto", "eth1", "10.0.0.1", [LO, fast, slow]))
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("eth1", ["eth1=10.0.1.1"]),
        ("eth2,eth0", ["eth2=10.0.2.1", "eth0=10.0.0.1"]),
        ("eth2, eth0", ["eth2=10.0.2.1", "eth0=10.0.0.1"]),
        ("10.0.2.2", ["eth2=10.0.2.2"]),
        ("fd00::2", ["eth2=fd00::2"]),
        ("fd00:0::0:2", ["eth2=fd00::2"]),
        ("eth2=10.0.2.2,eth2=10.0.2.1", ["eth2=10.0.2.2", "eth2=10.0.2.1"]),
        ("127.0.0.2,127.0.0.3", ["lo=127.0.0.2", "lo=127.0.0.3"]),
        ("lo=127.9.9.9", ["lo=127.9.9.9"]),
        ("lo", ["lo=127.0.0.1"]),
        ("::1", ["lo=::1"]),
        ("fe80::1", ["eth0=fe80::1"]),
        ("eth8", ["eth8=fe80::5"]),
        ("eth4", ["eth4=169.254.3.4"]),
        ("eth4=169.254.3.4", ["eth4=169.254.3.4"]),
        # A link-local address is another address after each boot.
        ("eth4=169.254.9.9", ["eth4=169.254.3.4"]),
        # A port that is absent, or has no address so far.
        ("eth1,eth9", ["eth1=10.0.1.1", "eth9=0.0.0.0"]),
        ("eth9=10.9.9.9,eth1", ["eth9=0.0.0.0", "eth1=10.0.1.1"]),
        ("eth5,eth1", ["eth5=0.0.0.0", "eth1=10.0.1.1"]),
    ],
)
def test_explicit_list(spec: str, expected: list[str]) -> None:
    more = [interface("eth8", "fe80::5"), interface("eth4", "169.254.3.4"), interface("eth5")]
    ports = choose_ports(spec, "", "10.0.0.1", [*HERE, *more])
    assert ends(ports) == expected
    for index, port in enumerate(ports):
        assert port.name == f"rail{index}"
        assert port.family == (socket.AF_INET6 if ":" in port.address else socket.AF_INET)


def test_explicit_list_may_name_interfaces_left_out_by_auto(
    caplog: pytest.LogCaptureFixture,
) -> None:
    down = interface("eth6", "10.9.0.5", up=False, carrier=False)
    bridge = interface("br0", "10.9.1.1", kind="bridge")
    choice = choose("eth6,br0", "", None, [down, bridge])
    assert ends(list(choice.ports)) == ["eth6=10.9.0.5", "br0=10.9.1.1"]
    tell(choice)
    [warning] = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert warning.startswith("rail port eth6 (10.9.0.5) is down")


def test_a_port_that_is_not_there_yet_is_a_single_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tell(choose("eth1,eth9", "", None, HERE))
    [warning] = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert "R2CCL_RAILS" in warning
    assert "'eth9', but this node has no such device or address" in warning


def test_ports_without_a_usable_address_may_become_rails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    address = ipaddress.ip_address("fd00::9")
    there = [
        LO,
        ETH1,
        interface("eth3", "fe80::3"),
        interface("eth4", carrier=False),
        dataclasses.replace(interface("eth5"), states=((address, "tentative"),)),
        interface("eth6", "10.9.0.5", up=False, carrier=False),
        interface("eth7", "10.9.0.7", carrier=False),
        interface("eth8", up=False),
        interface("veth1", "fe80::8", kind="veth"),
        interface("eth9", master="bond0", master_kind="bond"),
        interface("eth10"),
        interface("eth10.7", "10.7.0.1", kind="vlan", lower="eth10"),
    ]
    choice = choose("auto", "", None, there)
    assert ends(list(choice.ports)) == ["eth1=10.0.1.1", "eth7=10.9.0.7", "eth10.7=10.7.0.1"]
    assert [(port.name, port.device, port.address, port.waits) for port in choice.later] == [
        ("rail3", "eth3", "0.0.0.0", "no address so far"),
        ("rail4", "eth4", "0.0.0.0", "no carrier and no address so far"),
        ("rail5", "eth5", "::", "fd00::9 is tentative"),
        ("rail6", "eth6", "0.0.0.0", "down, although it has 10.9.0.5"),
    ]
    with caplog.at_level("INFO", logger="r2serve.ports.telling"):
        tell(choice)
    for device, level in (("eth3", "WARNING"), ("eth4", "INFO"), ("eth5", "WARNING")):
        told = [each for each in caplog.records if each.getMessage().startswith(f"{device} is no")]
        assert [each.levelname for each in told] == [level], device
    warned = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert not [text for text in warned if "eth4" in text or "veth1" in text]
    assert any(text.startswith("eth3 (no address") for text in not_used(choice))
    assert not any(text.startswith("eth3 ") for text in not_used(choice, {"eth3"}))


def test_a_veth_waits_for_an_address_where_no_physical_port_exists() -> None:
    there = [LO, interface("eth0", "fe80::1", kind="veth")]
    assert [port.device for port in choose("auto", "", None, there).later] == ["eth0"]
    pairs = [interface(f"lxc{index}", kind="veth") for index in range(20)]
    assert len(choose("auto", "", None, [LO, *pairs]).later) == 8
    assert choose("auto", "", None, [*HERE, *pairs]).later == ()


def test_an_address_that_stays_comes_before_one_that_goes_away() -> None:
    told = [
        netlink.AddressMessage(1, ipaddress.ip_address(text), "fd00::/64", state)
        for text, state in (
            ("fd00::1", "deprecated"),
            ("fd00::2", "tentative"),
            ("fd00::3", "temporary"),
            ("fd00::4", "duplicate"),
            ("fd00::5", ""),
        )
    ]
    usable = [str(each.address) for each in interfaces._usable(told)]
    assert usable == ["fd00::5", "fd00::3", "fd00::1"]


@pytest.mark.parametrize(
    ("version", "flags", "state"),
    [
        (4, 0x80, ""),
        (4, 0x81, ""),  # a secondary address
        (6, 0x01, "temporary"),
        (6, 0x21, "deprecated"),
        (6, 0x40, "tentative"),
        (6, 0x44, ""),  # optimistic duplicate address detection
        (6, 0x48, "duplicate"),
    ],
)
def test_the_kernels_flags_tell_the_state_of_an_address(
    version: int, flags: int, state: str
) -> None:
    assert netlink.address_state(version, flags) == state


def test_a_named_address_that_is_not_ready_waits() -> None:
    address = ipaddress.ip_address("10.3.0.1")
    port = dataclasses.replace(interface("eth3"), states=((address, "duplicate"),))
    choice = choose("eth1,10.3.0.1", "", None, [*HERE, port])
    assert ends(list(choice.ports)) == ["eth1=10.0.1.1", "eth3=0.0.0.0"]
    [warning] = choice.warnings
    assert "10.3.0.1 is duplicate" in warning


def test_an_explicit_list_may_wait_where_a_start_is_possible_without_it() -> None:
    choice = choose("eth9", "", None, HERE, may_wait=True)
    assert [(port.device, port.address) for port in choice.ports] == [("eth9", "0.0.0.0")]


def test_errors_list_few_interfaces() -> None:
    many = [interface(f"dummy{index}", kind="dummy") for index in range(800)]
    with pytest.raises(ConfigError) as caught:
        choose("eth77", "", None, [*many, ETH1])
    assert "eth1=10.0.1.1" in str(caught.value)
    assert "and 769 more" in str(caught.value)
    assert len(str(caught.value)) < 2000
    told = not_used(choose("auto", "", None, [*many, ETH1]))
    assert told[-1] == "and 784 more"
    assert len(", ".join(told)) < 1000


TWINS = [interface("eth3", "fe80::7"), interface("eth4", "fe80::7")]


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("eth9", "'eth9', but this node has no such device or address"),
        ("10.0.0.9", "'10.0.0.9', but this node has no such device or address"),
        ("eth9,eth8", "'eth9', but this node has no such device or address"),
        ("eth9=10.0.0.1", "'eth9=10.0.0.1', but this node has no such device or address"),
        ("eth1=10.0.0.1", "eth1 does not carry 10.0.0.1"),
        ("eth1=127.0.0.2", "eth1 does not carry 127.0.0.2"),
        ("eth1=ten", "'ten' is no address"),
        ("=10.0.0.1", "without a device before the ="),
        ("=eth1", "'=eth1'; filters as in NCCL_SOCKET_IFNAME are unknown here"),
        ("^docker0,lo", "or auto, which leaves out docker0"),
        ("eth", "the begin of eth0, eth1, eth2, eth8, eth3, eth4; filters"),
        ("", "an empty entry"),
        ("eth0,auto", "'auto' among other entries"),
        ("eth0,,eth1", "an empty entry"),
        ("eth8", "'eth8', which has no unicast address"),
        ("fe80::7", "an address of eth3, eth4: name the device, too"),
        ("eth0,10.0.0.1", "10.0.0.1 twice"),
        ("127.0.0.2,lo=127.0.0.2", "127.0.0.2 twice"),
    ],
)
def test_a_wrong_explicit_list_is_an_error_with_field_value_and_choices(
    spec: str, complaint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(spec, "", None, [*HERE, interface("eth8"), *TWINS])
    text = str(caught.value)
    assert "R2CCL_RAILS" in text
    assert repr(spec) in text
    assert complaint in text
    assert "twice" in text or "eth2=10.0.2.1" in text


@pytest.mark.parametrize("begin", ["eth", "^eth"])
def test_a_filter_of_nccl_is_no_port_that_may_come_later(begin: str) -> None:
    """Such a port would be a warning, and the engine would serve over the management NIC alone."""
    with pytest.raises(ConfigError, match="filters as in NCCL_SOCKET_IFNAME are unknown here"):
        choose(begin, "", None, HERE, may_wait=True)
    assert [port.device for port in choose("ib0", "", None, HERE, may_wait=True).ports] == ["ib0"]
    assert choose("eth", "", None, [LO], may_wait=True).ports[0].waits


@pytest.mark.parametrize("management", ["eth1", "10.0.1.1"])
def test_explicit_list_must_not_name_the_management_nic(management: str) -> None:
    with pytest.raises(ConfigError, match=r"R2CCL_RAILS.*eth1=10\.0\.1\.1.*R2CCL_MANAGEMENT"):
        choose_ports("eth0,eth1", management, None, HERE)
    assert ends(choose_ports("eth2=10.0.2.2", "10.0.2.1", None, HERE)) == ["eth2=10.0.2.2"]
    two = interface("eth5", "10.5.0.1", "10.6.0.1")
    two = dataclasses.replace(two, networks=("10.5.0.0/24", "10.6.0.0/24"))
    (port,) = choose_ports("eth5", "10.6.0.1", None, [LO, two])
    assert [each.address for each in port.addresses] == ["10.5.0.1"]


def test_node_identity() -> None:
    assert node_identity("", 0) == node_identity("", 1)
    assert str(os.stat("/proc/self/ns/net").st_ino) in node_identity("", 0)
    assert node_identity("per-rank", 0) != node_identity("per-rank", 1)
    assert node_identity("blue", 0) == node_identity("blue", 5) != node_identity("red", 0)
    # A node name never equals the identity from another spec.
    assert len({node_identity(spec, 0) for spec in ("", "per-rank", "rank:0", "0")}) == 4


def test_listing_this_machine() -> None:
    listed = list_interfaces()
    assert {nic.index: nic.name for nic in listed} == dict(socket.if_nameindex())
    (loopback,) = [nic for nic in listed if nic.loopback]
    assert loopback.name == "lo"
    [port] = select_ports("127.0.0.2", "", None).ports
    assert (port.name, port.device, port.address) == ("rail0", "lo", "127.0.0.2")
    assert (port.family, port.unit.name) == (socket.AF_INET, ""), "loopback is no hardware"


def test_a_broken_kernel_answer_is_an_error_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def recv(self, _: int) -> bytes:
            refused = (-1).to_bytes(4, "little", signed=True)
            return netlink._HEADER.pack(20, netlink._NLMSG_ERROR, 0, 1, 0) + refused

    with pytest.raises(PermissionError, match="cannot list network interfaces"):
        netlink._read_dump(Refusing(), 0)  # type: ignore[arg-type]


def test_a_read_that_a_change_interrupts_is_repeated_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = iter([([b"old"], False), ([b"old"], False), ([b"new"], True)])
    pauses: list[float] = []
    monkeypatch.setattr(netlink, "_dump", lambda *_: next(answers))
    read = netlink._read_list(None, 0, 0, b"", pauses.append)  # type: ignore[arg-type]
    assert read == ([b"new"], True)
    assert pauses == sorted(pauses)
    assert len(pauses) == 3


def test_a_named_interface_is_read_by_itself_where_no_read_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(netlink, "_read_list", lambda *_: ([], False))
    assert netlink.dump_links() == []
    [loopback] = netlink.dump_links(["lo", "no-such-dev0", "10.0.0.1"])
    assert (loopback.name, bool(loopback.flags & netlink.IFF_LOOPBACK)) == ("lo", True)


def test_interfaces_that_change_during_every_read_are_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A host of containers never stops to change; what stays is in some read."""
    read = netlink._read_dump
    count = itertools.count()
    gone = netlink.LinkMessage("gone0", 77777, 0, "", 0)

    def interrupted(asking: socket.socket, answer: int) -> tuple[list[bytes], bool]:
        payloads, _ = read(asking, answer)
        # Each read misses an interface.
        return payloads[1:] if next(count) % 2 else payloads[:-1], False

    whole = {link.name for link in netlink.dump_links()}
    monkeypatch.setattr(netlink, "_read_dump", interrupted)
    if len(whole) > 1:
        assert {link.name for link in netlink.dump_links()} == whole
    assert not netlink._exists(gone)


# This script runs in a new network namespace, which ends with the process.
IN_NAMESPACE = """
    import subprocess
    from r2serve.ports.choice import select_ports, unusable
    from r2serve.ports.identity import node_identity
    from r2serve.ports.interfaces import list_interfaces

    def ip(arguments):
        subprocess.run(["ip", *arguments.split()], check=True)

    ip("link set lo up")
    ip("link add name port0 type veth peer name port1")
    ip("link add name br0 type bridge")
    ip("link set dev port1 master br0")
    for device in ("port0", "port1", "br0"):
        ip(f"link set dev {device} up")
    ip("addr add 10.7.0.1/24 dev port0")
    ip("addr add 10.7.0.9/24 dev port0 label port0:x")
    ip("addr add 10.7.1.1/24 dev br0")
    listed = {nic.name: nic for nic in list_interfaces()}
    assert listed["port0"].kind == "veth", listed
    assert listed["port0"].carrier, listed
    assert {str(a) for a in listed["port0"].addresses} >= {"10.7.0.1", "10.7.0.9"}, listed
    assert (listed["port1"].master, listed["port1"].master_kind) == ("br0", "bridge"), listed
    assert unusable(listed["br0"]) == "a bridge interface"
    assert unusable(listed["port1"]) == "belongs to br0"
    (port,) = select_ports("auto", "", "10.7.0.1").ports
    assert (port.device, port.address, port.carrier) == ("port0", "10.7.0.1", True), port
    assert (port.mtu, port.mbit_s) == (1500, 10000), port
    assert port.reserve == "a veth pair inside this node", port
    assert [route.destination for route in port.routes] == ["10.7.0.0/24", "fe80::/64"], port
    ip("link set dev port1 down")
    (port,) = select_ports("auto", "", None).ports
    assert not port.carrier, port
    ip("link add mv0 link port0 type macvlan mode bridge")
    listed = {nic.name: nic for nic in list_interfaces()}
    assert listed["mv0"].lower == "port0", listed
    assert listed["port0"].lower == "", "the other end of a veth pair carries no packets"
    print(node_identity("", 0))
"""


def test_listing_real_interfaces_of_a_namespace() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may make a network namespace")
    for command in ("ip", "unshare"):
        if shutil.which(command) is None:
            pytest.skip(f"the command {command} is missing")
    if subprocess.run(["unshare", "-n", "true"], check=False).returncode:
        pytest.skip("this system allows no network namespace")
    script = textwrap.dedent(IN_NAMESPACE)
    done = subprocess.run(
        ["unshare", "-n", sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() != node_identity("", 0), "another namespace is another node"
