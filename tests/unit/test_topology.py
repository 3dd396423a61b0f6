"""Information exchanged by processes, and pairing of ports into rails."""

from __future__ import annotations

import ipaddress
import json
import re
import socket
from typing import Any

import pytest

from r2serve.config import Config
from r2serve.engines.vllm import management_address
from r2serve.errors import ConfigError
from r2serve.ports import identity
from r2serve.ports import management_address as addresses_here
from r2serve.ports.info import PortInfo, ProcessInfo
from r2serve.ports.interfaces import Interface
from r2serve.ports.management_address import (
    HostAddressError,
    find_management_address,
    own_address,
    owner_of,
)
from r2serve.ports.pairing import pair_ports, rails_between, why_tcp
from r2serve.process import Process
from r2serve.variables import MANAGEMENT


def info(process: int, node: str, ports: int, *, control: bool = False) -> ProcessInfo:
    return ProcessInfo(
        process=process,
        public_key=bytes([process]) * 32,
        node=node,
        host=f"host{process}",
        ports=tuple(
            PortInfo(f"eth{i}", f"10.0.{i}.{process}", 40_000 + 10 * process + i)
            for i in range(ports)
        ),
        control=PortInfo("", f"192.168.0.{process}", 50_000 + process) if control else None,
        unix_name=f"r2ccl-{process}",
    )


@pytest.mark.parametrize("control", [False, True])
def test_process_info_survives_the_store(control: bool) -> None:
    sent = info(3, "a", 2, control=control)
    assert ProcessInfo.from_wire(json.loads(json.dumps(sent.to_wire()))) == sent


def test_ports_pair_by_index() -> None:
    rails = rails_between(info(1, "a", 2), info(2, "b", 2), own_node=0)
    assert rails == [
        {
            "kind": "tcp",
            "name": f"rail{i}@node0",
            "device": f"eth{i}",
            "local_address": f"10.0.{i}.1",
            "remote_address": f"10.0.{i}.2",
            "remote_port": 40_020 + i,
            "remote_device": f"eth{i}",
            "verbs_device": "",
            "verbs_port": 0,
            "unnumbered": False,
            "told": False,
            "late": False,
            "dormant": False,
            "reserve": False,
            "unit": "",
            "distance": 0,
        }
        for i in (0, 1)
    ]


@pytest.mark.parametrize(("mine", "theirs"), [(1, 3), (3, 1), (2, 3), (4, 2), (3, 3)])
def test_both_ends_agree_on_the_rails(mine: int, theirs: int) -> None:
    one, two = info(1, "a", mine), info(2, "b", theirs)
    there = rails_between(one, two, own_node=0)
    back = rails_between(two, one, own_node=1)
    assert len(there) == len(back) == max(mine, theirs)
    for rail, other in zip(there, back, strict=True):
        assert rail["local_address"] == other["remote_address"]
        assert rail["remote_address"] == other["local_address"]
        assert rail["name"].split("@")[0] == other["name"].split("@")[0]
    assert {rail["local_address"] for rail in there} == {port.address for port in one.ports}
    assert {rail["remote_address"] for rail in there} == {port.address for port in two.ports}


def ports(host: int, *networks: str) -> list[PortInfo]:
    """Returns port `eth<i>` in the i-th network; a network is a letter, a blank = unknown."""
    return [
        PortInfo(f"eth{i}", f"10.{ord(name)}.{i}.{host}", i, network=name.strip())
        for i, name in enumerate(networks)
    ]


@pytest.mark.parametrize(
    ("mine", "theirs", "pairs"),
    [
        ("ab", "ab", [(0, 0), (1, 1)]),
        ("ab", "ba", [(0, 1), (1, 0)]),
        ("abc", "cab", [(0, 1), (1, 2), (2, 0)]),
        # Several ports in a network pair by index; the side with fewer ports uses its ports in
        # turn.
        ("aabb", "bbaa", [(0, 2), (1, 3), (2, 0), (3, 1)]),
        ("aaa", "aa", [(0, 0), (1, 1), (2, 0)]),
        ("aaab", "ab", [(0, 0), (1, 0), (2, 0), (3, 1)]),
        ("ab", "a", [(0, 0), (1, 0)]),
        # Ports without a common network pair in order, through a router.
        ("ab", "cd", [(0, 0), (1, 1)]),
        ("abc", "d", [(0, 0), (1, 0), (2, 0)]),
        ("ax", "ya", [(0, 1), (1, 0)]),
        ("a ", " a", [(0, 1), (1, 0)]),
        ("  ", "  ", [(0, 0), (1, 1)]),
        # Every port has a rail: a port left over joins the port with the fewest rails.
        ("abc", "ba", [(0, 1), (1, 0), (2, 0)]),
    ],
)
def test_ports_of_one_network_make_rails_with_each_other(
    mine: str, theirs: str, pairs: list[tuple[int, int]]
) -> None:
    near, far = ports(1, *mine), ports(2, *theirs)
    there = {(own.port, other.port) for own, other in pair_ports(near, far)}
    back = {(own.port, other.port) for other, own in pair_ports(far, near)}
    assert sorted(there) == pairs
    assert back == there, "the same whichever process has the lower number"


FABRICS = ("InfiniBand", "RoCE v1", "RoCE v2")


@pytest.mark.parametrize("mine", FABRICS)
@pytest.mark.parametrize("theirs", FABRICS)
def test_verbs_need_the_same_fabric_at_both_ends(mine: str, theirs: str) -> None:
    one = verbs_process(1, mine)
    two = verbs_process(2, theirs)
    for own, peer in ((one, two), (two, one)):
        [rail] = rails_between(own, peer, 0)
        assert rail["kind"] == ("verbs" if mine == theirs else "tcp")


def verbs_process(number: int, fabric: str) -> ProcessInfo:
    port = PortInfo("ib0", f"10.0.0.{number}", 1, f"mlx5_{number}", 1, "10.0.0.0/24", fabric)
    return ProcessInfo(number, bytes(32), f"node{number}", f"host{number}", (port,), None, "")


def test_required_verbs_refuse_a_tcp_rail_by_its_ports() -> None:
    one, two = verbs_process(1, "InfiniBand"), verbs_process(2, "RoCE v2")
    with pytest.raises(ConfigError) as caught:
        rails_between(one, two, 0, require_verbs=True)
    assert str(caught.value) == (
        "rdma (R2CCL_RDMA) is 'require', but ib0 (10.0.0.1, mlx5_1:1, InfiniBand) of host1 and "
        "ib0 (10.0.0.2, mlx5_2:1, RoCE v2) of host2 would make a TCP rail: "
        "InfiniBand does not reach RoCE v2"
    )
    with pytest.raises(ConfigError, match=r"10\.0\.0\.3 has no verbs"):
        rails_between(one, info(3, "b", 1), 0, require_verbs=True)
    same = rails_between(one, verbs_process(4, "InfiniBand"), 0, require_verbs=True)
    assert [rail["kind"] for rail in same] == ["verbs"]


def test_a_port_without_verbs_is_the_reason_for_a_tcp_rail() -> None:
    [plain], [other] = ports(1, "a"), ports(2, "a")
    assert why_tcp(plain, other) == f"{plain.address} and {other.address} have no verbs"
    [verbs] = verbs_process(2, "RoCE v2").ports
    assert why_tcp(verbs, plain) == why_tcp(plain, verbs) == f"{plain.address} has no verbs"
    assert why_tcp(verbs, verbs) == ""


def test_the_fabric_survives_the_store() -> None:
    sent = verbs_process(1, "RoCE v1")
    assert ProcessInfo.from_wire(json.loads(json.dumps(sent.to_wire()))) == sent


def test_ranks_of_one_node_use_shared_memory() -> None:
    rails = rails_between(info(1, "a", 2, control=True), info(2, "a", 2, control=True), own_node=4)
    assert [(rail["kind"], rail["name"], rail["remote_address"]) for rail in rails] == [
        ("shm", "shm@node4", "r2ccl-2")
    ]


def test_a_control_rail_needs_a_management_nic_at_both_ends() -> None:
    rails = rails_between(info(1, "a", 1, control=True), info(2, "b", 1, control=True), own_node=0)
    assert [rail["kind"] for rail in rails] == ["tcp", "control"]
    assert (rails[1]["local_address"], rails[1]["remote_address"]) == ("192.168.0.1", "192.168.0.2")
    rails = rails_between(info(1, "a", 1, control=True), info(2, "b", 1), own_node=0)
    assert [rail["kind"] for rail in rails] == ["tcp"]
    # The control rail is enough for a start where it may carry data.
    ends = info(1, "a", 0, control=True), info(2, "b", 1, control=True)
    rails = rails_between(*ends, own_node=0, fallback=True)
    assert [rail["kind"] for rail in rails] == ["control"]
    with pytest.raises(ConfigError, match="no usable NIC on host1"):
        rails_between(*ends, own_node=0)


@pytest.mark.parametrize(("mine", "theirs", "who"), [(0, 2, "host1"), (2, 0, "host2")])
def test_a_node_without_a_port_is_named(mine: int, theirs: int, who: str) -> None:
    with pytest.raises(ConfigError, match=f"R2CCL_RAILS: no usable NIC on {who} "):
        rails_between(info(1, "a", mine), info(2, "b", theirs), own_node=0)


HERE = [
    Interface("lo", 1, loopback=True, addresses=(ipaddress.ip_address("127.0.0.1"),)),
    Interface("eth0", 2, addresses=(ipaddress.ip_address("10.0.0.1"),)),
]


def test_control_traffic_uses_the_engines_variable_or_the_route_to_the_master(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(addresses_here, "list_interfaces", lambda: HERE)
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert find_management_address("127.0.0.1") == "127.0.0.1"
    assert find_management_address() == "10.0.0.1"
    monkeypatch.setenv("VLLM_HOST_IP", "127.7.8.1")  # virtual, behind a relay
    monkeypatch.setenv(MANAGEMENT, "10.0.0.1")
    assert find_management_address() == "10.0.0.1"
    monkeypatch.delenv(MANAGEMENT)
    monkeypatch.delenv("VLLM_HOST_IP")
    monkeypatch.setenv("SGLANG_HOST_IP", "10.0.0.1")
    assert find_management_address() == "10.0.0.1"
    monkeypatch.setenv("SGLANG_HOST_IP", "10.0.0.2")
    for argument in (None, "10.0.0.2"):
        with pytest.raises(HostAddressError, match=r"^SGLANG_HOST_IP is '10\.0\.0\.2': must be"):
            find_management_address(argument)
    monkeypatch.delenv("SGLANG_HOST_IP")
    with pytest.raises(
        HostAddressError, match=r"\(VLLM_HOST_IP, SGLANG_HOST_IP\) is '10\.0\.0\.2'"
    ):
        find_management_address("10.0.0.2")
    assert find_management_address() == "127.0.0.1"
    monkeypatch.delenv("MASTER_ADDR")
    assert find_management_address() is None


@pytest.mark.case("07", "the other ranks waited for the timeout")
def test_a_host_name_is_resolved_to_an_address_of_this_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {"node-a": ["127.0.1.1", "10.0.0.1"], "node-b": ["10.0.0.2"]}

    def getaddrinfo(name: str, *_: Any, **__: Any) -> list[Any]:
        if name not in names:
            raise socket.gaierror(-2, "Name or service not known")
        return [(0, 0, 0, "", (address, 0)) for address in names[name]]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert own_address("VLLM_HOST_IP", "node-a", HERE) == "10.0.0.1"
    for value, part in (
        ("node-b", "VLLM_HOST_IP is 'node-b', resolved to 10.0.0.2: must be"),
        ("node-c", "VLLM_HOST_IP is 'node-c', a name that cannot be resolved (Name or service"),
        ("10.0.0.2", "VLLM_HOST_IP is '10.0.0.2': must be an address of this node"),
    ):
        with pytest.raises(HostAddressError) as caught:
            own_address("VLLM_HOST_IP", value, HERE)
        assert part in str(caught.value)
        assert "this node has: lo=127.0.0.1, eth0=10.0.0.1" in str(caught.value)
    monkeypatch.setenv("MASTER_ADDR", "node-c")
    monkeypatch.delenv("VLLM_HOST_IP", raising=False)
    with pytest.raises(HostAddressError, match=r"MASTER_ADDR is 'node-c', a name that cannot"):
        find_management_address()


def test_the_rank_with_a_wrong_address_is_named() -> None:
    error = HostAddressError("VLLM_HOST_IP is '192.168.0.2': …", ["192.168.0.2"])
    infos = [None, info(2, "b", 2, control=True)]
    assert owner_of(error, infos) == "; 192.168.0.2 is an address of rank 1 (host host2)"
    assert owner_of(HostAddressError("…", ["10.7.7.7"]), infos) == ""
    assert owner_of(ValueError("192.168.0.2"), infos) == ""


def test_the_engines_address_variable_takes_precedence(monkeypatch) -> None:
    monkeypatch.setattr(management_address, "_found_address", lambda: "10.1.1.1")
    monkeypatch.setenv("VLLM_HOST_IP", "10.9.9.9")
    assert management_address.named_address() == "10.9.9.9"
    assert management_address.management_address() == "10.9.9.9"
    monkeypatch.setenv(MANAGEMENT, "10.0.0.2")  # VLLM_HOST_IP is virtual behind a relay
    assert management_address.management_address() == "10.0.0.2"
    monkeypatch.delenv(MANAGEMENT)
    monkeypatch.setenv("VLLM_HOST_IP", "")
    assert management_address.named_address() is None
    assert management_address.management_address() == "10.1.1.1"


def test_an_unreachable_host_gives_no_address() -> None:
    assert identity.local_address_towards("host.invalid") is None


def test_a_process_listens_on_each_of_its_rails() -> None:
    config = Config(rails="127.0.0.1,127.0.0.2", node="here")
    process = Process(config, 0, "127.0.0.1")
    try:
        assert [port.address for port in process.info.ports] == ["127.0.0.1", "127.0.0.2"]
        assert all(port.port > 0 and port.device == "" for port in process.info.ports)
        assert process.info.control is None, "loopback needs no network of its own for control"
        with pytest.raises(ConfigError, match=re.escape("rank 7 is this process itself")):
            process.add_peer(process.info, "rank 7", 0)
    finally:
        process.engine.close(0.0)
