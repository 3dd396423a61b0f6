"""Rails between two nodes: the output of `r2serve topo --peer` equals the engine's choice."""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from patients import end, findings, nic, patient

from r2serve import _core, process
from r2serve.cli import topo as cli
from r2serve.config import Config
from r2serve.errors import ConfigError, R2cclError
from r2serve.ports.choice import Choice, Port
from r2serve.ports.interfaces import Interface
from r2serve.ports.rdma import Gid, RdmaPort, transport_of
from r2serve.process import Process
from r2serve.topo import node, peer, reach
from r2serve.topo.checks import Finding
from r2serve.topo.node import Chain, ChainHop, NodeReport
from r2serve.topo.peer import End, Peer, pairs

IB = {"fabric": "InfiniBand", "verbs_device": "mlx5_9"}
TCP = {"fabric": "", "verbs_device": "", "verbs_port": 0}


def rdma_port(*gids: tuple[str, str], layer: str = "Ethernet", device: str = "mlx5_0") -> RdmaPort:
    """Returns a port with GIDs of these types and addresses."""
    table = tuple(
        Gid(index, ipaddress.IPv6Address(address), kind, "eth0")
        for index, (kind, address) in enumerate(gids)
    )
    return RdmaPort(device, 1, "ACTIVE", layer, 100.0, 1, table, "eth0", -1, "")


OWN, OTHER, LINK = "::ffff:10.0.0.1", "::ffff:10.0.0.9", "fe80::1"
BOTH = rdma_port(("RoCE v1", LINK), ("RoCE v1", OWN), ("RoCE v2", OWN))


class Engine:
    """A fake core: opens every device except `broken`."""

    opened: list[str] = []  # noqa: RUF012

    def __init__(self, config: dict[str, Any], number: int) -> None:
        self.opened.clear()

    def open_verbs(self, device: str, port: int) -> None:
        self.opened.append(f"{device}:{port}")
        if device == "broken":
            raise R2cclError("registering 8 bytes with broken: Cannot allocate memory")

    def listen(self, kind: str, device: str, address: str) -> int:
        return 1

    no_journal = ""

    def set_label(self, label: str) -> None:
        """Ignores the label."""

    def set_serving_engine(self, name: str) -> None:
        """Ignores the name."""

    def close(self, linger_s: float) -> None:
        self.opened.append("closed")


CASES = [
    (BOTH, -1, "RoCE v2", ""),
    (BOTH, 1, "RoCE v1", ""),
    (BOTH, 0, "RoCE v1", ""),
    (rdma_port(("RoCE v1", OWN)), -1, "RoCE v1", ""),
    (rdma_port(("IB", LINK), layer="InfiniBand"), -1, "InfiniBand", ""),
    (rdma_port(("RoCE v2", OTHER)), -1, "", "mlx5_0:1 has no GID for 10.0.0.1"),
    (rdma_port(), -1, "", "mlx5_0:1 has no GID for 10.0.0.1"),
    (rdma_port(layer="InfiniBand"), -1, "", "mlx5_0:1 cannot be used: the port has no GID"),
    (BOTH, 7, "", r"mlx5_0:1 cannot be used: .*R2CCL_GID_INDEX\) is 7"),
    (rdma_port(("RoCE v2", OWN), device="broken"), -1, "", "broken:1 cannot be used: registering"),
    (None, -1, "", "the port has no RDMA device"),
]


@pytest.fixture
def _one_rail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "Engine", Engine)
    address = ipaddress.ip_address("10.0.0.1")
    card = Interface("eth0", 2, addresses=(address,), networks=("10.0.0.0/24",))
    monkeypatch.setattr(node, "list_interfaces", lambda: [card])


def plug(monkeypatch: pytest.MonkeyPatch, port: RdmaPort | None) -> None:
    """Makes `port` the node's only RDMA port, on its only rail."""
    rail = Port("rail0", "eth0", "10.0.0.1", socket.AF_INET, "10.0.0.0/24", port)
    for module in (node, process):
        monkeypatch.setattr(module, "list_ports", lambda: [port] if port else [])
        monkeypatch.setattr(module, "select_ports", lambda *_: Choice((rail,)))


@pytest.mark.usefixtures("_one_rail")
@pytest.mark.parametrize(("port", "gid_index", "fabric", "why"), CASES)
def test_topo_doctor_and_engine_agree_on_the_fabric_of_a_port(
    port: RdmaPort | None,
    gid_index: int,
    fabric: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plug(monkeypatch, port)
    config = Config(gid_index=gid_index)
    here = node.look(config)
    if port is not None and "no GID" not in why and "GID_INDEX" not in why:
        assert Engine.opened == [port.name, "closed"]
    [told] = Process(config, 0, None).info.ports
    assert dataclasses.replace(told, port=0) == here.ports[0].info()
    assert told.fabric == fabric
    [shown] = here.nics
    assert shown.kind == ("verbs" if told.verbs_device else "tcp") == ("tcp" if why else "verbs")
    assert bool(shown.gid) == bool(fabric)

    required = dataclasses.replace(config, rdma="require")
    [finding] = findings(patient(node=here, config=required), "RDMA")
    if not why:
        assert finding.level == "ok"
        assert Process(required, 0, None).info.ports == (told,)
        return
    assert finding.level == "failure"
    with pytest.raises(ConfigError, match=why) as caught:
        Process(required, 0, None)
    assert shown.why_tcp in str(caught.value)
    assert shown.why_tcp in finding.text
    [finding] = findings(patient(node=here, config=config), "RDMA")
    assert finding.level == ("warning" if port else "ok")


@pytest.mark.usefixtures("_one_rail")
def test_disabled_rdma_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    plug(monkeypatch, BOTH)
    Engine.opened.clear()
    here = node.look(Config(rdma="off"))
    assert (here.nics[0].kind, here.ports[0].verbs_device) == ("tcp", "")
    assert Engine.opened == []


def test_the_gid_equals_the_cores_choice() -> None:
    transport = transport_of(BOTH, "10.0.0.1", Config(), lambda *_: None)
    assert transport.gid == BOTH.gids[2]
    assert transport.fabric == "RoCE v2"


def test_pairs_have_a_kind_and_the_slower_speed() -> None:
    own = (end(0), end(1, gbit_s=25.0), end(2, **TCP))
    other = (end(0, 2, gbit_s=40.0), end(1, 2, **IB), end(2, 2, **TCP))
    found = [(pair.own.rail, pair.other.rail, pair.kind, pair.gbit_s) for pair in pairs(own, other)]
    assert found == [
        ("rail0", "rail0", "verbs", 40.0),
        ("rail1", "rail1", "tcp", 25.0),
        ("rail2", "rail2", "tcp", 100.0),
    ]
    assert pairs(own, other)[1].why_tcp == "RoCE v2 does not reach InfiniBand"
    assert pairs(own, ()) == pairs((), other) == ()


# ---- the commands ----


def a_node(host: str, number: int, *swaps: int, **changes: Any) -> NodeReport:
    """Returns a node with a port in each of these networks."""
    ends = [
        dataclasses.replace(end(net, number, **changes), rail=f"rail{place}", device=f"eth{place}")
        for place, net in enumerate(swaps)
    ]
    chain = Chain("any rank", -1, (ChainHop("rail0", "eth0", "SYS"),))
    return NodeReport(host, (nic("eth0"), nic("eth1")), (chain,), "ok", ports=tuple(ends))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> NodeReport:
    made = a_node("host1", 1, 0, 1)
    monkeypatch.setattr(node, "look", lambda *_: made)
    monkeypatch.setenv("COLUMNS", "200")
    return made


def run(command: Any, *arguments: str | Path) -> Result:
    return CliRunner().invoke(command, [str(each) for each in arguments])


def write(folder: Path, there: NodeReport) -> Path:
    """Writes the node like `r2serve topo --json` does."""
    path = folder / "peer.json"
    path.write_text(json.dumps(there.to_json()))
    return path


@pytest.mark.usefixtures("here")
def test_topo_shows_pairs_of_ports(tmp_path: Path) -> None:
    path = write(tmp_path, a_node("host2", 2, 1, 0, mtu=1500, gbit_s=25.0))
    told = json.loads(run(cli.topo, "--peer", path, "--json").output)["peer"]
    assert told["host"] == "host2"
    assert [
        (each["own"]["rail"], each["other"]["rail"], each["kind"], each["gbit_s"])
        for each in told["pairs"]
    ] == [("rail0", "rail1", "verbs", 25.0), ("rail1", "rail0", "verbs", 25.0)]
    shown = run(cli.topo, "--peer", path).output
    [line] = [line for line in shown.splitlines() if line.startswith("rail0 eth0")]
    assert "rail1 eth1" in line
    for word in ("10.0.0.1", "10.0.0.2", "verbs", "25", "4200 and 1500"):
        assert word in line


@pytest.mark.usefixtures("here")
def test_topo_says_that_chains_are_estimates() -> None:
    assert "A failover chain is an estimate" in run(cli.topo).output
    assert "peer" not in json.loads(run(cli.topo, "--json").output)


@pytest.mark.usefixtures("here")
def test_the_peer_option_reads_the_output_of_topo(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(run(cli.topo, "--json").output)
    assert peer.read(path) == Peer("host1", (end(0), end(1)))


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"host": "old", "nics": []}',
        '{"host": "x", "ports": [{}]}',
        json.dumps({"host": "x", "ports": [dataclasses.asdict(end()) | {"network": 7}]}),
        json.dumps({"host": "x", "ports": [dataclasses.asdict(end()) | {"more": 7}]}),
    ],
)
def test_an_invalid_peer_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "peer.json"
    path.write_text(text)
    for command in (cli.topo, cli.check):
        result = run(command, "--peer", path)
        assert result.exit_code == 1
        assert "peer.json must be the output of `r2serve topo --json` of this" in result.output


@pytest.mark.usefixtures("here")
def test_a_peer_without_ports_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, a_node("host2", 2))
    assert (
        "no rails between host1 and host2: no port on host2" in run(cli.topo, "--peer", path).output
    )
    result = run(cli.check, "--peer", path)
    assert result.exit_code == 1
    assert "host2 has no port" in result.output


def of_peer(*ends: Any, **config: Any) -> list[Finding]:
    """Returns the doctor's findings about a peer with these ports."""
    there = patient(config=Config(**config), peer=Peer("host2", ends))
    return findings(there, "peer")


def test_the_doctor_compares_both_ends_of_rails() -> None:
    assert [found.level for found in of_peer(end(0, 2), end(1, 2))] == ["ok"]
    [found] = of_peer(end(0, 2, mtu=1500), end(1, 2))
    assert (found.level, "4200 and 1500" in found.text) == ("warning", True)
    [found] = of_peer(end(0, 2, mtu=0), end(1, 2))
    assert found.level == "ok", "not known is not different"
    [found] = of_peer(end(0, 2, network="10.9.0.0/24"), end(1, 2))
    assert (found.level, "different networks" in found.text) == ("note", True)


@pytest.mark.parametrize(
    ("there", "text"),
    [
        (end(1, 1), "both ends have the address 10.0.1.1"),
        (end(1, 2, address="fd00::2"), "no common address family"),
        (end(1, 2, address="127.0.0.1"), "no common network"),
    ],
)
def test_the_doctor_names_ports_without_a_rail(there: End, text: str) -> None:
    [found] = of_peer(end(0, 2, routes=()), dataclasses.replace(there, routes=()))
    assert found.level == "warning"
    assert "eth1 (10.0.1.1" in found.text
    assert "has no rail to host2: " in found.text
    assert text in found.text
    assert found.fix


def test_the_doctor_predicts_a_missing_route() -> None:
    def route(own: End, other: End) -> str:
        assert (own.device, other.address) in (("eth0", "10.0.0.2"), ("eth1", "10.0.1.2"))
        return "Network is unreachable" if own.device == "eth1" else ""

    there = patient(peer=Peer("host2", (end(0, 2), end(1, 2))), route=route)
    [found] = findings(there, "peer")
    assert found.level == "failure"
    assert "no route from eth1 (10.0.1.1) to 10.0.1.2: Network is unreachable" in found.text


def test_the_kernel_is_asked_for_the_route() -> None:
    lo = {"device": "lo", "address": "127.0.0.1"}
    assert reach.route(end(0, 1, **lo), end(0, 2, address="127.0.0.2")) == ""
    assert reach.route(end(0, 1, device="", address="192.0.2.1"), end(0, 2)) != "", "not ours"


def test_the_doctor_names_pairs_without_verbs() -> None:
    [found] = of_peer(end(0, 2), end(1, 2, fabric="RoCE v1"))
    assert found.level == "warning"
    assert "eth1 (10.0.1.1, mlx5_1:1, RoCE v2) and eth1 (10.0.1.2, mlx5_1:1, RoCE v1)" in found.text
    assert found.fix
    [found] = of_peer(end(0, 2), end(1, 2, fabric="RoCE v1"), rdma="require")
    assert found.level == "failure"
    [found] = of_peer(end(0, 2), end(1, 2, **TCP), rdma="off")
    assert found.level == "ok"


def test_without_a_peer_the_doctor_names_the_option() -> None:
    [found] = findings(patient(), "peer")
    assert (found.level, "--peer" in found.text) == ("ok", True)
