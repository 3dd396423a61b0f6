"""The doctor's check of listening ports: number, free ports, rule, and the kernel's own range."""

from __future__ import annotations

import dataclasses
import socket
from typing import Any

import pytest
from patients import end, findings, patient

from r2serve.config import Config
from r2serve.option import port_window
from r2serve.topo import listening
from r2serve.topo.checks import Finding, Patient
from r2serve.topo.firewall import Rules
from r2serve.topo.gpus import Gpu


def with_gpus(count: int, ports: str, **changes: Any) -> Patient:
    # The rules apply to the window, as the doctor reads them.
    window = port_window(ports) if ports else None
    here = patient(config=Config(ports=ports), rules=Rules((), ports=window or (32768, 60999)))
    gpus = tuple(
        Gpu(index, "GPU", "9.0", dma_buf=False, buffers="host memory", why_not="")
        for index in range(count)
    )
    return dataclasses.replace(here, node=dataclasses.replace(here.node, gpus=gpus), **changes)


def told(of: Patient) -> list[Finding]:
    return findings(of, "ports")


def test_without_a_window_the_kernels_range_is_named() -> None:
    [found] = told(with_gpus(8, ""))
    assert found.level == "ok"
    assert "32768 to 60999, 8 at each of 2 addresses (1 for each process, 8 GPUs)" in found.text
    assert "R2CCL_PORTS" in found.text


def test_the_needed_ports_are_counted_and_the_rule_is_printed() -> None:
    rule, overlap = told(with_gpus(8, "40000-40050"))
    assert rule.level == "note"
    assert "40000-40050: 51 ports; needed: 8 at each of 2 addresses" in rule.text
    assert "--dport 40000:40050" in rule.fix
    assert overlap.fix == "sysctl -w net.ipv4.ip_local_reserved_ports=40000-40050"


@pytest.mark.parametrize(
    ("reserved", "overlaps"),
    [("", True), ("40000-40049", True), ("22,40000-40050", False), ("39000-41000", False)],
)
def test_a_window_in_the_kernels_range_is_to_be_reserved(reserved: str, overlaps: bool) -> None:
    found = told(with_gpus(1, "40000-40050", reserved_ports=reserved))
    assert [one for one in found if "sysctl" in one.fix] == (found[1:] if overlaps else [])
    assert len(told(with_gpus(1, "20000-20050", reserved_ports=""))) == 1


def test_a_window_that_is_too_small_is_a_failure() -> None:
    [found] = told(with_gpus(8, "40000-40003"))
    assert found.level == "failure"
    assert "4 ports; needed: 8" in found.text
    assert found.fix.startswith("R2CCL_PORTS=40000-400")


def test_occupied_ports_are_a_warning() -> None:
    here = with_gpus(2, "20000-20050", free_ports=lambda at, _: 1 if at.device == "eth1" else 51)
    (short, _) = told(here)
    assert short.level == "warning"
    assert "free now: 1 at 10.0.1.1 (eth1)" in short.text
    assert short.fix.endswith("R2CCL_PORTS=20000-20101")


def test_free_ports_are_those_where_a_listener_can_bind() -> None:
    at = end(0, device="lo", address="127.0.41.7").info()
    with socket.socket() as taken:
        taken.bind(("127.0.41.7", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        assert listening.free_ports(at, (port, port)) == 0
    assert listening.free_ports(at, (port, port)) == 1
