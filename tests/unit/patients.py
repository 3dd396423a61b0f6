"""Nodes examined by the doctor in tests: healthy, except for a test's changes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from r2serve.config import Config
from r2serve.topo import doctor
from r2serve.topo.checks import FAILURE, WARNING, Finding, Patient
from r2serve.topo.firewall import Rules
from r2serve.topo.node import Nic, NodeReport
from r2serve.topo.peer import End

PFC_ON = """\
pfc-cap 8 macsec-bypass off delay 0
prio-pfc 0:off 1:off 2:off 3:on 4:off 5:off 6:off 7:off
"""
PFC_OFF = """\
pfc-cap 8 macsec-bypass on delay 0
prio-pfc 0:off 1:off 2:off 3:off 4:off 5:off 6:off 7:off
"""
TCP = {"rdma": "", "rdma_state": "", "gid": "", "verbs": None, "kind": "tcp", "driver": "veth"}
"""Changes that turn a NIC into a NIC without RDMA."""


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


def end(number: int = 0, host: int = 1, **changes: Any) -> End:
    """Returns the port `eth<number>` of a host."""
    healthy = End(
        rail=f"rail{number}",
        device=f"eth{number}",
        address=f"10.0.{number}.{host}",
        network=f"10.0.{number}.0/24",
        verbs_device=f"mlx5_{number}",
        verbs_port=1,
        fabric="RoCE v2",
        gbit_s=100.0,
        mtu=4200,
    )
    return dataclasses.replace(healthy, **changes)


def patient(*nics: Nic, **changes: Any) -> Patient:
    node = NodeReport("here", nics or (nic("eth0"), nic("eth1")), (), "ok", ports=(end(0), end(1)))
    healthy = Patient(
        node=node,
        config=Config(),
        memlock_bytes=-1,
        uverbs=(Path("/dev/null"),),
        modules=frozenset({"mlx5_ib"}),
        rules=Rules(()),
        pfc=lambda _: PFC_ON,
        setting=lambda *_: 0,
    )
    return dataclasses.replace(healthy, **changes)


def complaints(of: Patient) -> list[Finding]:
    return [finding for finding in doctor.judge(of) if finding.level in (FAILURE, WARNING)]


def findings(of: Patient, check: str) -> list[Finding]:
    """Returns the findings of a single check."""
    return [finding for finding in doctor.judge(of) if finding.check == check]
