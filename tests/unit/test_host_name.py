"""The doctor's check of the host's name: with a loopback address, two nodes do not start."""

from __future__ import annotations

import socket

import pytest
from patients import findings, nic, patient

from r2serve.topo import host_name
from r2serve.topo.checks import FAILURE, OK, WARNING, HostName

ETH0 = frozenset({"lo", "eth0", "eth1"})


@pytest.mark.parametrize(
    ("name", "level", "text", "fix"),
    [
        (HostName("n", ("10.0.0.1",)), OK, "nothing found", ""),
        (HostName("n", ("127.0.1.1", "10.0.0.1")), OK, "nothing found", ""),
        (
            HostName("n", ("127.0.1.1", "::1")),
            WARNING,
            "'n' is 127.0.1.1, ::1, and GLOO_SOCKET_IFNAME is not set",
            "export GLOO_SOCKET_IFNAME=DEVICE, with the device of VLLM_HOST_IP or SGLANG_HOST_IP",
        ),
        (
            HostName("n", ("127.0.1.1",), control="10.0.1.1"),
            WARNING,
            "not set",
            "export GLOO_SOCKET_IFNAME=eth1",
        ),
        (HostName("n"), WARNING, "'n' cannot be resolved", "export GLOO_SOCKET_IFNAME=DEVICE"),
        (HostName("n", ("127.0.1.1",), ("eth0",), ETH0), OK, "nothing found", ""),
        (
            HostName("n", ("10.0.0.1",), ("eth0", "eth7"), ETH0, "10.0.0.1"),
            FAILURE,
            "names 'eth7', and this node has no such device",
            "export GLOO_SOCKET_IFNAME=eth0",
        ),
    ],
)
def test_the_name_is_judged(name: HostName, level: str, text: str, fix: str) -> None:
    [found] = findings(patient(nic("eth0"), nic("eth1"), host_name=name), "host name")
    assert found.level == level
    assert text in found.text
    assert found.fix.startswith(fix)
    assert bool(found.fix) == bool(fix)


def test_the_name_of_this_host_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth9")
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.9")
    found = host_name.look()
    assert found.name == socket.gethostname()
    assert (found.gloo, found.control) == (("lo", "eth9"), "10.0.0.9")
    assert "lo" in found.devices
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-name.invalid")
    monkeypatch.setattr(socket, "getaddrinfo", _fails)
    assert (host_name.look().addresses, host_name.look().gloo) == ((), ())


def _fails(*_: object, **__: object) -> None:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
