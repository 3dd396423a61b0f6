"""RDMA ports, read from sysfs."""

import dataclasses
import ipaddress
from pathlib import Path

import pytest

from r2serve.errors import ConfigError
from r2serve.ports import choice, rdma
from r2serve.ports.info import PortInfo, ProcessInfo
from r2serve.ports.interfaces import Interface
from r2serve.ports.pairing import rails_between


def make_port(
    sysfs: Path,
    device: str,
    port: int = 1,
    *,
    state: str = "4: ACTIVE",
    layer: str = "Ethernet",
    gids: list[tuple[str, str, str]] | None = None,
    parent: str = "",
) -> None:
    """Writes a port's attributes; `gids`: address, type, interface."""
    directory = sysfs / device / "ports" / str(port)
    (directory / "gids").mkdir(parents=True)
    for name in ("types", "ndevs"):
        (directory / "gid_attrs" / name).mkdir(parents=True)
    (directory / "state").write_text(state + "\n")
    (directory / "link_layer").write_text(layer + "\n")
    (directory / "rate").write_text("100 Gb/sec (4X EDR)\n")
    (directory / "lid").write_text("0x1f\n")
    if parent:
        (sysfs / device / "parent").write_text(parent + "\n")
    for index, (address, kind, netdev) in enumerate(gids or []):
        (directory / "gids" / str(index)).write_text(address + "\n")
        (directory / "gid_attrs" / "types" / str(index)).write_text(kind + "\n")
        (directory / "gid_attrs" / "ndevs" / str(index)).write_text(netdev + "\n")


ZERO = "0000:0000:0000:0000:0000:0000:0000:0000"
MAPPED = "0000:0000:0000:0000:0000:ffff:0a00:0001"


def test_a_roce_port(tmp_path: Path) -> None:
    make_port(
        tmp_path,
        "mlx5_0",
        gids=[
            (ZERO, "IB/RoCE v1", ""),
            (MAPPED, "IB/RoCE v1", "eth2"),
            (MAPPED, "RoCE v2", "eth2"),
        ],
    )
    [port] = rdma.list_ports(tmp_path)
    assert (port.name, port.netdev, port.active, port.gbit_s) == ("mlx5_0:1", "eth2", True, 100.0)
    assert [(gid.index, gid.kind) for gid in port.gids] == [(1, "RoCE v1"), (2, "RoCE v2")]
    assert port.gids[0].address.ipv4_mapped is not None
    assert port.lid == 31
    assert port.answers_to("10.0.0.1")
    assert not port.answers_to("10.0.0.2"), "a port of the host, seen from a container"
    assert (port.pci, port.numa_node, port.software) == ("", -1, False)


def test_an_infiniband_port_and_its_interface(tmp_path: Path) -> None:
    make_port(
        tmp_path,
        "mlx5_1",
        state="1: DOWN",
        layer="InfiniBand",
        gids=[("fe80:0000:0000:0000:0002:c903:0000:0001", "IB/RoCE v1", "")],
    )
    function = tmp_path / "mlx5_1" / "device"
    (function / "net" / "ib0").mkdir(parents=True)
    (function / "net" / "ib0" / "dev_port").write_text("0\n")
    (function / "vendor").write_text("0x15b3\n")
    (function / "numa_node").write_text("1\n")
    [port] = rdma.list_ports(tmp_path)
    assert (port.netdev, port.active, port.link_layer) == ("ib0", False, "InfiniBand")
    assert [gid.kind for gid in port.gids] == ["IB"]
    assert port.numa_node == 1
    assert port.pci == "device"
    assert port.answers_to("10.0.0.1"), "whatever IPoIB has"


def test_soft_roce_names_its_parent(tmp_path: Path) -> None:
    make_port(tmp_path, "rxe0", parent="eth7")
    [port] = rdma.list_ports(tmp_path)
    assert port.netdev == "eth7"
    assert port.software


def test_no_rdma_at_all(tmp_path: Path) -> None:
    assert rdma.list_ports(tmp_path / "nothing") == []


def test_ports_are_found_by_name_and_interface(tmp_path: Path) -> None:
    make_port(tmp_path, "mlx5_0", 1, state="1: DOWN", gids=[(MAPPED, "RoCE v2", "eth0")])
    make_port(tmp_path, "mlx5_0", 2, gids=[(MAPPED, "RoCE v2", "eth0")])
    ports = rdma.list_ports(tmp_path)
    named = [rdma.find_port(ports, name) for name in ("mlx5_0:2", "mlx5_0", "eth0")]
    assert named == [ports[1], ports[0], None]
    assert rdma.port_of_interface(ports, "eth0") == ports[1], "the active one"
    assert rdma.port_of_interface(ports, "eth1") is None


def test_rails_may_name_rdma_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_port(tmp_path, "mlx5_3", gids=[(MAPPED, "RoCE v2", "eth0")])
    make_port(tmp_path, "mlx5_4", layer="InfiniBand")
    ports = rdma.list_ports(tmp_path)
    address = ipaddress.ip_address("10.0.0.1")
    monkeypatch.setattr(
        choice, "list_interfaces", lambda _: [Interface("eth0", 2, addresses=(address,))]
    )
    [port] = choice.select_ports("mlx5_3:1", "", None, ports).ports
    assert (port.device, port.address, port.rdma) == ("eth0", "10.0.0.1", ports[0])
    with pytest.raises(ConfigError, match=r"R2CCL_RAILS.*mlx5_4:1 has no network interface"):
        choice.select_ports("mlx5_4", "", None, ports)


def process(number: int, *ports: PortInfo) -> ProcessInfo:
    return ProcessInfo(number, bytes(32), f"node{number}", "host", ports, None, "")


def test_a_rail_uses_verbs_if_both_ports_do() -> None:
    verbs = PortInfo("eth0", "10.0.0.1", 1, "mlx5_0", 2)
    tcp = PortInfo("eth1", "10.1.0.1", 1)
    far_verbs = dataclasses.replace(verbs, address="10.0.0.2")
    far_tcp = dataclasses.replace(tcp, address="10.1.0.2")
    rails = rails_between(
        process(1, verbs, verbs, tcp), process(2, far_verbs, far_tcp, far_verbs), 0
    )
    assert [rail["kind"] for rail in rails] == ["verbs", "tcp", "tcp"]
    assert (rails[0]["verbs_device"], rails[0]["verbs_port"]) == ("mlx5_0", 2)
