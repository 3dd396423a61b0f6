"""Distances, failover chains, the picture, and the doctor's findings."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from r2serve.config import Config
from r2serve.topo import doctor, gpus, pci, picture
from r2serve.topo.doctor import Finding, Patient
from r2serve.topo.gpus import HOST_ASSISTED, Gpu
from r2serve.topo.node import Chain, Nic, Node, Step
from r2serve.topo.pci import Distance


def plug(root: Path, path: str, numa: int = 0, vendor: int = 0x15B3, kind: int = 0x020000) -> None:
    """A PCI function at a path below ``devices``, with its link in ``bus``."""
    directory = root / "devices" / path
    directory.mkdir(parents=True)
    (directory / "numa_node").write_text(f"{numa}\n")
    (directory / "vendor").write_text(f"{vendor:#x}\n")
    (directory / "class").write_text(f"{kind:#x}\n")
    (root / "bus").mkdir(exist_ok=True)
    (root / "bus" / directory.name).symlink_to(directory)


def test_distances(tmp_path: Path) -> None:
    switch = "pci0000:00/0000:00:01.0/0000:01:00.0"
    far_switch = f"{switch}/0000:02:08.0/0000:05:00.0"
    plug(tmp_path, f"{switch}/0000:02:00.0/0000:03:00.0")
    plug(tmp_path, f"{switch}/0000:02:01.0/0000:04:00.0")
    plug(tmp_path, f"{far_switch}/0000:06:00.0/0000:07:00.0")
    plug(tmp_path, "pci0000:00/0000:00:02.0/0000:08:00.0")
    plug(tmp_path, "pci0000:40/0000:40:01.0/0000:41:00.0")
    plug(tmp_path, "pci0000:80/0000:80:01.0/0000:81:00.0", numa=1)
    bus = tmp_path / "bus"
    here = pci.function("0000:03:00.0", bus)
    there = {
        "0000:04:00.0": Distance.PIX,
        "0000:07:00.0": Distance.PXB,
        "0000:08:00.0": Distance.PHB,
        "0000:41:00.0": Distance.NODE,
        "0000:81:00.0": Distance.SYS,
        "0000:99:00.0": Distance.SYS,
    }
    for address, wanted in there.items():
        other = pci.function(address, bus)
        assert pci.distance(here, other) == pci.distance(other, here) == wanted, address


def test_gpus_are_nvidias_display_and_3d_controllers(tmp_path: Path) -> None:
    plug(tmp_path, "pci0000:00/0000:01:00.0", vendor=0x10DE, kind=0x030200)
    plug(tmp_path, "pci0000:00/0000:02:00.0", vendor=0x10DE, kind=0x040300)
    plug(tmp_path, "pci0000:00/0000:03:00.0", vendor=0x1002, kind=0x030000)
    assert [gpu.address for gpu in pci.gpus(tmp_path / "bus")] == ["0000:01:00.0"]


def nic(name: str = "eth0", **changes: Any) -> Nic:
    healthy = Nic(
        name=name,
        addresses=(f"10.0.{name[-1]}.1",),
        network=f"10.0.{name[-1]}.0/24",
        up=True,
        carrier=True,
        mtu=4200,
        gbit_s=100.0,
        driver="mlx5_core",
        pci="",
        numa_node=-1,
        rdma=f"mlx5_{name[-1]}:1",
        rdma_state="ACTIVE",
        gid=f"3 (RoCE v2, 10.0.{name[-1]}.1)",
        verbs={"active_mtu": 4096, "max_mtu": 4096},
        rail=f"rail{name[-1]}",
        kind="verbs",
        why_not="",
    )
    return dataclasses.replace(healthy, **changes)


def patient(*nics: Nic, **changes: Any) -> Patient:
    node = Node("here", nics or (nic("eth0"), nic("eth1")), (), "ok")
    healthy = Patient(
        node=node,
        config=Config(),
        memlock_bytes=-1,
        uverbs=(Path("/dev/null"),),
        modules=frozenset({"mlx5_ib"}),
        nft={"nftables": [{"chain": {"hook": "input", "policy": "accept"}}]},
        pfc=lambda _: "prio-pfc 0:off 3:on on",
        arp_ignore=lambda _: 0,
    )
    return dataclasses.replace(healthy, **changes)


def complaints(of: Patient) -> list[Finding]:
    levels = (doctor.FAILURE, doctor.WARNING)
    return [finding for finding in doctor.judge(of) if finding.level in levels]


def gpu(**changes: Any) -> Gpu:
    healthy = Gpu(0, "H200", "9.0", True, HOST_ASSISTED, "r2serve does not use GPUDirect yet")
    return dataclasses.replace(healthy, **changes)


def with_gpus(*found: Gpu, cuda: str = "ok") -> Patient:
    return patient(node=dataclasses.replace(patient().node, gpus=found, cuda=cuda))


@pytest.mark.parametrize(
    ("found", "level", "text"),
    [
        (gpu(), "note", "buffers are in pinned memory of the host; .* this GPU could"),
        (gpu(buffers="", why_not="no nvcc in the path"), "warning", "gpu0 .* no nvcc"),
    ],
)
def test_of_gpus_it_is_said_where_buffers_are(found: Gpu, level: str, text: str) -> None:
    [finding] = [each for each in doctor.judge(with_gpus(found)) if each.check == "GPU"]
    assert finding.level == level
    assert re.search(text, finding.text)


def test_gpus_without_a_driver_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pci, "gpus", lambda: [pci.Function("0000:01:00.0", 0, ())])
    [finding] = complaints(with_gpus(cuda="no CUDA driver"))
    assert finding.text == "there are GPUs, and the driver shows none: no CUDA driver"


def test_what_the_driver_says_of_gpus(fake_cuda: Path) -> None:
    found, state = gpus.look(Config(cuda_library=str(fake_cuda)))
    assert state == "ok"
    assert found == (
        Gpu(0, "Fake", "9.0", False, HOST_ASSISTED, "r2serve does not use GPUDirect yet"),
    )
    assert gpus.look(Config(cuda_library="libnone.so"))[1].startswith("no CUDA driver: libnone.so")


def test_the_command_alone_needs_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R2CCL_CUDA_LIBRARY", "libnone.so")
    command = [Path(sys.executable).with_name("r2serve"), "topo", "--json"]
    said = subprocess.run(command, capture_output=True, timeout=60, check=True).stdout
    assert json.loads(said)["cuda"].startswith("no CUDA driver: libnone.so")


def test_a_healthy_node_has_no_complaint() -> None:
    assert complaints(patient()) == []
    assert {finding.check for finding in doctor.judge(patient())} >= set(doctor.CHECKS) - {
        "pyverbs",
        "GPU",
    }


TCP = {"rdma": "", "rdma_state": "", "gid": "", "verbs": None, "kind": "tcp", "driver": "veth"}


@pytest.mark.parametrize(
    ("sick", "level", "check", "text"),
    [
        (patient(nic("eth0")), "warning", "rails", "only rail"),
        (
            patient(nic("eth0", rail="", kind="", why_not="no carrier")),
            "failure",
            "rails",
            "no carrier",
        ),
        (patient(nic("eth0", up=False), nic("eth1")), "failure", "link", "eth0 is down"),
        (patient(nic("eth0", carrier=False), nic("eth1")), "failure", "link", "no carrier"),
        (patient(nic("eth0", rdma_state="DOWN"), nic("eth1")), "failure", "link", "mlx5_0:1"),
        (
            patient(
                nic("eth0", **{**TCP, "driver": "mlx5_core"}), nic("eth1"), modules=frozenset()
            ),
            "warning",
            "kernel module",
            "mlx5_ib",
        ),
        (patient(uverbs=()), "failure", "kernel module", "uverbs"),
        (patient(uverbs=(Path("/nowhere/uverbs0"),)), "failure", "permission", "uverbs0"),
        (patient(memlock_bytes=65536), "failure", "memlock limit", "65536"),
        (patient(memlock_bytes=30 << 20), "warning", "memlock limit", "locked"),
        (patient(nic("eth0", gid=""), nic("eth1")), "failure", "GID", "no GID"),
        (patient(nic("eth0", gid="1 (RoCE v1, 10.0.0.1)"), nic("eth1")), "warning", "GID", "v1"),
        (patient(nic("eth0", mtu=1500), nic("eth1")), "warning", "MTU", "eth0 1500"),
        (
            patient(nic("eth0", verbs={"active_mtu": 1024, "max_mtu": 4096}), nic("eth1")),
            "warning",
            "MTU",
            "1024 bytes",
        ),
        (
            patient(nic("eth0", network="10.0.0.0/16"), nic("eth1", network="10.0.0.0/16")),
            "warning",
            "ARP",
            "eth0, eth1",
        ),
        (
            patient(
                nft={"nftables": [{"chain": {"hook": "input", "policy": "drop", "name": "in"}}]}
            ),
            "warning",
            "firewall",
            "in",
        ),
    ],
)
def test_each_sickness_is_found_and_has_a_fix(
    sick: Patient, level: str, check: str, text: str
) -> None:
    found = [finding for finding in complaints(sick) if finding.check == check]
    assert [finding.level for finding in found] == [level]
    assert text in found[0].text
    assert found[0].fix


def test_a_library_that_is_missing_matters_where_it_is_needed() -> None:
    missing = dataclasses.replace(patient().node, libibverbs="libibverbs.so.1: no such file")
    [found] = complaints(patient(node=missing))
    assert (found.level, found.check) == ("warning", "libibverbs")
    required = patient(node=missing, config=Config(rdma="require"))
    assert complaints(required)[0].level == "failure"
    tcp_only = Node("here", (nic("eth0", **TCP), nic("eth1", **TCP)), (), "no such file")
    assert complaints(patient(node=tcp_only)) == []


def test_priority_flow_control_is_a_note() -> None:
    for told, known in (("", "is not known"), ("prio-pfc 0:off", "is off")):
        texts = [f.text for f in doctor.judge(patient(pfc=lambda _, told=told: told))]
        assert any(known in text for text in texts)


def test_the_picture_is_well_formed_and_names_everything() -> None:
    chain = Chain("gpu0 <&>", 0, (Step("rail1", "eth1", "PIX"), Step("rail0", "eth0", "SYS")))
    node = Node("host", (nic("eth0"), nic("eth1", carrier=False)), (chain,), "ok")
    root = ElementTree.fromstring(picture.draw(node))
    texts = " ".join(element.text or "" for element in root.iter() if element.tag.endswith("text"))
    for word in ("eth0", "rail1", "mlx5_0:1", "gpu0 <&>", "PIX", "100 Gbit/s"):
        assert word in texts
    lines = [element for element in root.iter() if element.tag.endswith("line")]
    assert [line.get("class") for line in lines] == ["near", None]
