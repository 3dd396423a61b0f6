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
from click.testing import CliRunner
from patients import PFC_OFF, PFC_ON, TCP, complaints, end, findings, nic, patient

from r2serve.cli import topo as cli
from r2serve.config import Config
from r2serve.ports import pci
from r2serve.ports.pci import Distance
from r2serve.topo import doctor, gpus, picture, system, verbs
from r2serve.topo.checks import Finding, Patient
from r2serve.topo.gpus import DIRECT, HOST_ASSISTED, Gpu
from r2serve.topo.node import Chain, ChainHop, NodeReport

ROOT = Path(__file__).resolve().parents[2]


def plug(root: Path, path: str, numa: int = 0, vendor: int = 0x15B3, kind: int = 0x020000) -> None:
    """Creates a PCI function at a path below `devices`, with its link in `bus`."""
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


def gpu(**changes: Any) -> Gpu:
    healthy = Gpu(0, "H200", "9.0", True, DIRECT, "")
    return dataclasses.replace(healthy, **changes)


def with_gpus(*found: Gpu, cuda: str = "ok") -> Patient:
    return patient(node=dataclasses.replace(patient().node, gpus=found, cuda=cuda))


@pytest.mark.parametrize(
    ("found", "level", "text"),
    [
        (gpu(), "note", r"buffers are in GPU memory \(GPUDirect\)$"),
        (
            gpu(buffers=HOST_ASSISTED, why_not="no rail is RDMA"),
            "note",
            "buffers are in pinned host memory; no rail is RDMA$",
        ),
        (gpu(buffers="", why_not="no nvcc in the path"), "warning", "gpu0 .* no nvcc"),
    ],
)
def test_findings_name_the_memory_of_gpu_buffers(found: Gpu, level: str, text: str) -> None:
    [finding] = findings(with_gpus(found), "GPU")
    assert finding.level == level
    assert re.search(text, finding.text)


@pytest.mark.parametrize(
    ("why_not", "fix"),
    [
        ("no rail is RDMA", ""),
        ("the CUDA driver gives no memory out as a dma-buf: NVIDIA's", "open kernel modules"),
        ("libibverbs has no ibv_reg_dmabuf_mr: rdma-core 34 or later is needed", "rdma-core"),
        ("of a dma-buf with rxe0, whose driver takes none: ibv_reg_dmabuf_mr: …", "NIC's driver"),
        ("checksums are on (R2CCL_CHECKSUM): the CPU computes them", "unset R2CCL_CHECKSUM"),
    ],
)
def test_findings_name_the_fix_for_gpudirect(why_not: str, fix: str) -> None:
    [finding] = findings(with_gpus(gpu(buffers=HOST_ASSISTED, why_not=why_not)), "GPU")
    assert why_not in finding.text
    assert fix in finding.fix
    assert bool(finding.fix) == bool(fix)


@pytest.mark.parametrize(
    ("options", "rdma", "why"),
    [
        ({}, [], "^no rail is RDMA$"),
        ({"gpu_direct": "off"}, ["rxe0"], "R2CCL_GPU_DIRECT"),
        ({"checksum": True}, ["rxe0"], "R2CCL_CHECKSUM"),
        ({}, ["no-such-device"], "no-such-device|libibverbs|RDMA devices: "),
    ],
)
def test_the_probe_gives_the_reason_for_host_buffers(
    fake_cuda: Path, options: dict[str, Any], rdma: list[str], why: str
) -> None:
    [found], _ = gpus.look(Config(cuda_library=str(fake_cuda), **options), rdma)
    assert found.buffers == HOST_ASSISTED
    assert re.search(why, found.why_not)


def test_gpus_without_a_driver_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pci, "gpus", lambda: [pci.Function("0000:01:00.0", 0, ())])
    [finding] = complaints(with_gpus(cuda="no CUDA driver"))
    assert finding.text == "GPUs exist, but the driver shows none: no CUDA driver"


def test_gpus_are_read_from_the_driver(fake_cuda: Path) -> None:
    found, state = gpus.look(Config(cuda_library=str(fake_cuda)))
    assert state == "ok"
    assert found == (Gpu(0, "Fake", "9.0", True, HOST_ASSISTED, "no rail is RDMA"),)
    assert gpus.look(Config(cuda_library="libnone.so"))[1].startswith("no CUDA driver: libnone.so")


def test_the_command_alone_needs_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R2CCL_CUDA_LIBRARY", "libnone.so")
    command = [Path(sys.executable).with_name("r2serve"), "topo", "--json"]
    said = subprocess.run(command, capture_output=True, timeout=300, check=True).stdout
    assert json.loads(said)["cuda"].startswith("no CUDA driver: libnone.so")


def test_a_healthy_node_has_no_complaint() -> None:
    assert complaints(patient()) == []
    assert {finding.check for finding in doctor.judge(patient())} >= set(doctor.CHECKS) - {
        "pyverbs",
        "GPU",
    }


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
        (
            patient(nic("eth0", kind="tcp", why_tcp="mlx5_0:1 has no GID for …"), nic("eth1")),
            "warning",
            "RDMA",
            "eth0 use TCP: mlx5_0:1 has no GID",
        ),
        (
            patient(
                nic("eth0", **TCP, why_tcp="the port has no RDMA device"),
                nic("eth1"),
                config=Config(rdma="require"),
            ),
            "failure",
            "RDMA",
            "'require'",
        ),
        (patient(nic("eth0", gid="1 (RoCE v1, 10.0.0.1)"), nic("eth1")), "warning", "GID", "v1"),
        (patient(nic("eth0", mtu=1500), nic("eth1")), "warning", "MTU", "eth0 1500"),
        (
            patient(nic("eth0", verbs={"active_mtu": 1024, "max_mtu": 4096}), nic("eth1")),
            "warning",
            "MTU",
            "1024 bytes",
        ),
        (
            patient(
                node=NodeReport(
                    "here",
                    (nic("eth0"), nic("eth1")),
                    (),
                    "ok",
                    ports=(end(0, network="10.0.0.0/16"), end(1, network="10.0.0.0/16")),
                )
            ),
            "warning",
            "ARP",
            "eth0 and eth1",
        ),
    ],
)
def test_each_problem_is_found_and_has_a_fix(
    sick: Patient, level: str, check: str, text: str
) -> None:
    found = [finding for finding in complaints(sick) if finding.check == check]
    assert [finding.level for finding in found] == [level]
    assert text in found[0].text
    assert found[0].fix


@pytest.mark.parametrize(
    ("units", "shared", "level", "text"),
    [
        (("eth0", "eth1"), (), "ok", "nothing found"),
        (
            ("eth9", "eth9"),
            ("eth0 and eth1 share the physical port eth9: one unit of redundancy",),
            "warning",
            "nothing is left to fail over to",
        ),
        (
            ("eth0", "eth1"),
            ("eth0 and eth1 have cables of their own, but share one card (PCI 0000:01:00)",),
            "note",
            "share one card",
        ),
    ],
)
def test_rails_that_fail_together_are_found(
    units: tuple[str, str], shared: tuple[str, ...], level: str, text: str
) -> None:
    rails = (nic("eth0", unit=units[0]), nic("eth1", unit=units[1]))
    node = NodeReport("here", rails, (), "ok", ports=(end(0), end(1)), shared=shared)
    [found] = findings(patient(node=node), "shared fate")
    assert found.level == level
    assert text in found.text
    assert bool(found.fix) == (level == "warning")


def test_warnings_of_the_choice_are_findings() -> None:
    told = "eth9 is no rail, although it is faster than a rail: no address"
    node = dataclasses.replace(patient().node, warnings=(told,))
    [found] = findings(patient(node=node), "rails")
    assert (found.level, found.text) == ("warning", told)


def test_a_missing_library_fails_only_if_required() -> None:
    missing = dataclasses.replace(patient().node, libibverbs="libibverbs.so.1: no such file")
    [found] = complaints(patient(node=missing))
    assert (found.level, found.check) == ("warning", "libibverbs")
    required = patient(node=missing, config=Config(rdma="require"))
    assert complaints(required)[0].level == "failure"
    why = f"mlx5_0:1 cannot be used: {missing.libibverbs}"
    without = dataclasses.replace(missing, nics=(nic("eth0", kind="tcp", why_tcp=why), nic("eth1")))
    assert [found.check for found in complaints(patient(node=without))] == ["libibverbs"]
    tcp_only = NodeReport("here", (nic("eth0", **TCP), nic("eth1", **TCP)), (), "no such file")
    assert complaints(patient(node=tcp_only)) == []


def test_a_build_without_rdma_needs_a_new_build_and_no_library() -> None:
    core = (ROOT / "csrc/drivers/ibverbs.cc").read_text()
    (reason,) = re.findall(r'"(this build of r2serve has no RDMA support: [^"]*)"', core)
    node = dataclasses.replace(patient().node, libibverbs=reason)
    [found] = complaints(patient(node=node))
    assert (found.check, reason in found.text) == ("libibverbs", True)
    assert found.fix.startswith("install libibverbs-dev (Debian, Ubuntu) or rdma-core-devel (RHEL)")
    assert "build r2serve again" in found.fix
    assert "libibverbs1" not in found.fix


def test_unwanted_rdma_is_no_problem() -> None:
    off = nic("eth0", kind="tcp", why_tcp="R2CCL_RDMA is 'off'")
    assert findings(patient(off, config=Config(rdma="off")), "RDMA")[0].level == "ok"
    plain = nic("eth0", **TCP, why_tcp="the port has no RDMA device")
    assert findings(patient(plain), "RDMA")[0].level == "ok"


def test_a_memlock_limit_that_keeps_rails_from_verbs_is_named() -> None:
    why = "mlx5_0:1 cannot be used: registering 1048576 bytes with mlx5_0: Cannot allocate memory"
    rails = [nic(name, kind="tcp", why_tcp=why) for name in ("eth0", "eth1")]
    [found] = findings(patient(*rails, memlock_bytes=65536), "memlock limit")
    assert (found.level, "65536" in found.text) == ("warning", True)


@pytest.mark.parametrize(
    ("gid", "level"),
    [
        ("3 (RoCE v2, 10.0.0.1)", "ok"),
        ("3 (RoCE v2, 10.0.0.11)", "note"),
        ("0 (IB, fe80::2:c903:0:1)", "ok"),
    ],
)
def test_a_gid_of_another_address_is_a_note(gid: str, level: str) -> None:
    assert findings(patient(nic("eth0", gid=gid)), "GID")[0].level == level


@pytest.mark.parametrize(
    ("told", "level", "text"),
    [
        (PFC_ON, "ok", ""),
        (PFC_OFF, "note", "is off"),
        ("", "note", "is unknown"),
    ],
)
def test_priority_flow_control_is_a_note(told: str, level: str, text: str) -> None:
    [found] = findings(patient(nic("eth0"), pfc=lambda _: told), "PFC")
    assert found.level == level
    assert text in found.text


def test_the_import_error_of_pyverbs_is_shown() -> None:
    why = "libibverbs.so.1: version `IBVERBS_1.15' not found"
    [found] = findings(patient(pyverbs=why), "pyverbs")
    assert (found.level, why in found.text) == ("note", True)
    assert "python3-pyverbs" in found.fix
    assert "Cython" in found.fix
    no_rdma = patient(nic("eth0", **TCP), pyverbs=why)
    assert findings(no_rdma, "pyverbs")[0].level == "ok"


def test_a_device_error_of_pyverbs_is_shown() -> None:
    error = "Failed to open device mlx5_0. Errno: 13, Permission denied"
    [found] = findings(patient(nic("eth0", verbs={"error": error}), nic("eth1")), "pyverbs")
    assert (found.level, error in found.text) == ("warning", True)
    assert found.fix


def test_the_state_of_pyverbs_is_the_import_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "pyverbs"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "device.py").write_text("raise ImportError('libefa.so.1: no such file')\n")
    monkeypatch.setattr(verbs, "_DEBIAN", str(tmp_path / "none"))
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyverbs"]:
        monkeypatch.delitem(sys.modules, name)
    assert verbs.pyverbs_state() == "libefa.so.1: no such file"
    assert verbs.pyverbs_device() is None
    sys.modules.pop("pyverbs", None)  # removes this test's pyverbs


def test_failed_commands_give_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nft"
    tool.write_text("#!/bin/sh\necho Operation not permitted >&2\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert system.ask("nft").why_not == "nft: Operation not permitted"
    assert system.ask("no-such-tool").why_not == "no-such-tool is not installed"
    assert system.ask("sh", "-c", "exit 3").why_not == "sh: exit status 3"
    assert system.ask("sh", "-c", "echo yes").text == "yes\n"


def test_brackets_in_findings_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [Finding("note", "firewall", "[Errno 13] in [/x]")]
    monkeypatch.setattr(doctor, "examine", lambda *_: told)
    assert "[Errno 13] in [/x]" in CliRunner().invoke(cli.check, catch_exceptions=False).output


def test_the_picture_is_well_formed_and_names_everything() -> None:
    chain = Chain(
        "gpu0 <&>", 0, (ChainHop("rail1", "eth1", "PIX"), ChainHop("rail0", "eth0", "SYS"))
    )
    node = NodeReport("host", (nic("eth0"), nic("eth1", carrier=False)), (chain,), "ok")
    root = ElementTree.fromstring(picture.draw(node))
    texts = " ".join(element.text or "" for element in root.iter() if element.tag.endswith("text"))
    for word in ("eth0", "rail1", "mlx5_0:1", "gpu0 <&>", "PIX", "100 Gbit/s"):
        assert word in texts
    lines = [element for element in root.iter() if element.tag.endswith("line")]
    assert [line.get("class") for line in lines] == ["near", None]
