"""Networks of `r2serve bench serve` for stock engines: connections survive the loss of a rail."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from timely import patience, timely

pytest.importorskip("aiohttp")

from r2serve.bench.serve import networks
from r2serve.bench.serve.networks import Multipath, Network, VirtualAddress, virtual
from r2serve.lab.holder import LabUnavailableError
from r2serve.lab.lab import Lab
from r2serve.lab.nodes import Node

ECHO = """
import socket, sys
listener = socket.create_server((sys.argv[1], 9000))
print("ready", flush=True)
connection, _ = listener.accept()
while data := connection.recv(65536):
    connection.sendall(data)
"""
# Prints a line after the first echo, and the longest wait for an echo of 1 KiB, in ms.
ASK = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 9000))
longest, begun = 0, time.monotonic()
while time.monotonic() < begun + float(sys.argv[2]):
    before = time.monotonic()
    connection.sendall(bytes(1024))
    got = 0
    while got < 1024:
        got += len(connection.recv(65536))
    if not longest:
        print("echoed", flush=True)
    longest = max(longest, time.monotonic() - before)
    time.sleep(0.01)
print(round(1000 * longest))
"""
SECONDS = 9.0
CUT_AFTER_S = 2.0
# Both networks reroute within 2 s. A connection without rerouting gets no more echoes at all.
LONGEST_MS = 20_000
ROUTES_S = 240.0
"""Longest wait for the routes of BIRD, times `patience`."""


@pytest.fixture
def lab() -> Iterator[Lab]:
    try:
        with Lab(nodes=3, rails=2) as made:
            yield made
    except LabUnavailableError as error:
        pytest.skip(f"no lab on this machine: {error}")


def needs_mptcp() -> None:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262):
            return
    except OSError as error:
        pytest.skip(f"no MPTCP: {error}")


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("ecmp", "cut"),
        ("mptcp", "black_hole"),
        pytest.param("ecmp", "black_hole", marks=pytest.mark.long),
        pytest.param("mptcp", "cut", marks=pytest.mark.long),
    ],
)
def test_a_connection_survives_the_loss_of_its_rail(
    kind: str, fault: str, lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(networks, "ROUTES_TIMEOUT_S", ROUTES_S * patience())
    network: Network = VirtualAddress()
    address = virtual(lab.nodes[0])
    if kind == "mptcp":
        needs_mptcp()
        network = Multipath()
        address = lab.nodes[0].rail_address(0)
    settings = network.build(lab, tmp_path)
    network.begin(lab, tmp_path)
    environment = {**os.environ, **settings}
    server, client = lab.nodes[:2]
    echoing = server.popen(
        [sys.executable, "-c", ECHO, address], env=environment, stdout=subprocess.PIPE
    )
    assert echoing.stdout.readline() == b"ready\n"
    asking = client.popen(
        [sys.executable, "-c", ASK, address, str(SECONDS)],
        env=environment,
        stdout=subprocess.PIPE,
    )
    assert asking.stdout.readline() == b"echoed\n"
    time.sleep(CUT_AFTER_S)
    rail = 0 if kind == "mptcp" else rail_of_the_route(lab)
    getattr(lab, fault)(1, rail)
    said, _ = asking.communicate(timeout=300)
    assert asking.returncode == 0
    timely(lambda: int(said) < LONGEST_MS, f"an echo after {int(said)} ms", 0)
    if kind == "ecmp":
        timely(lambda: routes_of(client) == [f"rail{1 - rail}"], "a route by the other rail")


def routes_of(node: Node) -> list[str]:
    """Returns the devices of BIRD's routes."""
    routes = json.loads(node.run("ip", "-json", "route", "show", "proto", "bird"))
    return [route["dev"] for route in routes]


def rail_of_the_route(lab: Lab) -> int:
    """Returns the rail of the connection: the rail with more bytes sent."""
    sent = {}
    for link in json.loads(lab.nodes[1].run("ip", "-json", "-statistics", "link", "show")):
        if link["ifname"].startswith("rail"):
            sent[int(link["ifname"].removeprefix("rail"))] = link["stats64"]["tx"]["bytes"]
    return max(sent, key=lambda rail: sent[rail])
