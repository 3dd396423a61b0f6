"""Choice of interfaces as rails, syntax of explicit lists, and identity of nodes."""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket
import subprocess
import sys
import textwrap

import pytest

from r2serve.errors import ConfigError
from r2serve.ports import netlink
from r2serve.ports.choice import Port, choose_ports, select_ports, unusable
from r2serve.ports.identity import node_identity
from r2serve.ports.interfaces import Interface, list_interfaces


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
    "a wireguard interface": interface("wg0", "10.9.0.4", kind="wireguard"),
    "a tun interface": interface("tailscale0", "100.64.0.4", kind="tun"),
    "down": interface("eth6", "10.9.0.5", up=False, carrier=False),
    "no carrier": interface("eth7", "10.9.0.6", carrier=False),
    "no unicast address except link-local": interface("eth8", "169.254.3.4", "fe80::5"),
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
    ],
)
def test_auto_takes_interfaces_with_their_own_traffic(usable: Interface) -> None:
    assert unusable(usable) == ""


def test_auto_falls_back_to_ipv6() -> None:
    nic = interface("eth0", "fe80::1", "fd00::7", "2001:db8::7")
    (port,) = choose_ports("auto", "", None, [nic])
    assert (port.address, port.family) == ("fd00::7", socket.AF_INET6)


def test_auto_leaves_the_engines_nic_free_while_others_remain() -> None:
    assert ends(choose_ports("auto", "", "10.0.1.1", HERE)) == ["eth0=10.0.0.1", "eth2=10.0.2.1"]
    assert ends(choose_ports("auto", "", "fd00::2", HERE)) == ["eth0=10.0.0.1", "eth1=10.0.1.1"]
    assert ends(choose_ports("auto", "", "10.0.1.1", [LO, ETH1])) == ["eth1=10.0.1.1"]
    # An unusable NIC does not count as a remaining rail.
    unused = interface("eth9", "10.0.9.1", carrier=False)
    assert ends(choose_ports("auto", "", "10.0.1.1", [LO, ETH1, unused])) == ["eth1=10.0.1.1"]


@pytest.mark.parametrize("address", ["127.0.0.1", "10.77.0.1", "head-node", "0.0.0.0", ""])
def test_an_engine_address_without_a_nic_excludes_no_nic(address: str) -> None:
    assert len(choose_ports("auto", "", address, HERE)) == 3


@pytest.mark.parametrize("management", ["eth1", "10.0.1.1"])
def test_a_named_management_nic_is_never_a_rail(management: str) -> None:
    chosen = choose_ports("auto", management, "10.0.0.1", HERE)
    assert ends(chosen) == ["eth0=10.0.0.1", "eth2=10.0.2.1"]
    assert choose_ports("auto", management, None, [LO, ETH1]) == []


def test_a_missing_management_nic_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"R2CCL_MANAGEMENT.*'eth9'.*eth0=10\.0\.0\.1"):
        choose_ports("auto", "eth9", None, HERE)


def test_auto_without_any_nic_gives_no_rail() -> None:
    assert choose_ports("auto", "", None, [LO]) == []


def test_auto_logs_chosen_and_unused_interfaces(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="r2serve.ports.choice"):
        choose_ports("auto", "", "10.0.0.1", HERE)
    assert "rails: eth1, eth2; not used: lo (loopback), eth0 (management)" in caplog.text


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
    ],
)
def test_explicit_list(spec: str, expected: list[str]) -> None:
    ports = choose_ports(spec, "", "10.0.0.1", HERE)
    assert ends(ports) == expected
    for index, port in enumerate(ports):
        assert port.name == f"rail{index}"
        assert port.family == (socket.AF_INET6 if ":" in port.address else socket.AF_INET)


def test_explicit_list_may_name_interfaces_left_out_by_auto(
    caplog: pytest.LogCaptureFixture,
) -> None:
    down = interface("eth6", "10.9.0.5", up=False, carrier=False)
    bridge = interface("br0", "10.9.1.1", kind="bridge")
    assert ends(choose_ports("eth6,br0", "", None, [down, bridge])) == [
        "eth6=10.9.0.5",
        "br0=10.9.1.1",
    ]
    assert "eth6 is down" in caplog.text
    assert "br0" not in caplog.text


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("eth9", "'eth9', but this node has no such device or address"),
        ("eth1,eth9", "'eth9', but this node has no such device or address"),
        ("10.0.0.9", "'10.0.0.9', but this node has no such device or address"),
        ("eth9=10.0.0.1", "'eth9=10.0.0.1', but this node has no such device or address"),
        ("eth1=10.0.0.1", "eth1 does not carry 10.0.0.1"),
        ("eth1=127.0.0.2", "eth1 does not carry 127.0.0.2"),
        ("eth1=ten", "'ten' is no address"),
        ("=10.0.0.1", "without a device before the ="),
        ("", "an empty entry"),
        ("eth0,,eth1", "an empty entry"),
        ("eth8", "'eth8', which has no unicast address"),
        ("fe80::1", "a link-local IPv6 address"),
        ("eth0,10.0.0.1", "10.0.0.1 twice"),
        ("127.0.0.2,lo=127.0.0.2", "127.0.0.2 twice"),
    ],
)
def test_a_wrong_explicit_list_is_an_error_with_field_value_and_choices(
    spec: str, complaint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_ports(spec, "", None, [*HERE, UNUSABLE["no unicast address except link-local"]])
    text = str(caught.value)
    assert "R2CCL_RAILS" in text
    assert repr(spec) in text
    assert complaint in text
    assert "twice" in text or "eth2=10.0.2.1" in text


@pytest.mark.parametrize("management", ["eth1", "10.0.1.1"])
def test_explicit_list_must_not_name_the_management_nic(management: str) -> None:
    with pytest.raises(ConfigError, match=r"R2CCL_RAILS.*eth1=10\.0\.1\.1.*R2CCL_MANAGEMENT"):
        choose_ports("eth0,eth1", management, None, HERE)
    assert ends(choose_ports("eth2=10.0.2.2", "10.0.2.1", None, HERE)) == ["eth2=10.0.2.2"]


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
    assert select_ports("127.0.0.2", "", None) == [
        Port(name="rail0", device="lo", address="127.0.0.2", family=socket.AF_INET)
    ]


def test_a_broken_kernel_answer_is_an_error_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def recv(self, _: int) -> bytes:
            refused = (-1).to_bytes(4, "little", signed=True)
            return netlink._HEADER.pack(20, netlink._NLMSG_ERROR, 0, 1, 0) + refused

    with pytest.raises(PermissionError, match="cannot list network interfaces"):
        netlink._read_dump(Refusing())  # type: ignore[arg-type]
    monkeypatch.setattr(netlink, "_read_dump", lambda _: None)
    with pytest.raises(OSError, match="changes faster"):
        list_interfaces()


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
    (port,) = select_ports("auto", "", "10.7.0.1")
    assert (port.device, port.address) == ("port0", "10.7.0.1"), port
    ip("link set dev port1 down")
    assert select_ports("auto", "", None) == []
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
