"""A rail comes back from an address that is new to its peer, while strangers flood the peer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from real_rails import REJOIN_S, Stream, translating

from r2serve.lab.faults import nic_name
from r2serve.lab.holder import LabCommandError
from r2serve.lab.lab import Lab
from r2serve.lab.nodes import Node

FLOODER = Path(__file__).parent / "workers/flooder.py"
STRANGERS = 2  # the node of the lab without a rank
MANY = 50  # connections of strangers; the room has 128, each for at most 0.5 s
RAIL = 0


def connections(node: Node, *conditions: str) -> int:
    """Returns the number of established TCP connections of a node, by conditions of `ss`."""
    asked = ["ss", "--no-header", "--tcp", "--numeric", "state", "established", *conditions]
    return len(node.run(*asked).splitlines())


def listener(stream: Stream, node: int, rail: int) -> str:
    """Returns address and port of a node's listener, as the other rank knows it."""
    return str(stream.rails(1 - node)[rail]["remote"])


def acceptor(stream: Stream) -> int:
    """Returns the node that has accepted the connection of the rail."""
    found = [
        node
        for node in (0, 1)
        if connections(stream.lab.nodes[node], "src", listener(stream, node, RAIL))
    ]
    assert len(found) == 1, found
    return found[0]


@contextmanager
def flooded(lab: Lab, listeners: list[str], pause_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """Floods listeners with silent connections, with a pause after each."""
    addresses = [each.rpartition(":")[::2] for each in listeners]
    argument = json.dumps({"addresses": addresses, "pause_s": pause_s})
    process = lab.nodes[STRANGERS].popen([sys.executable, str(FLOODER), argument])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def moved(lab: Lab, node: int, address: str) -> Iterator[None]:
    """Replaces the address of the node's port; the carrier stays up."""
    device = nic_name(RAIL)
    lab.nodes[node].run(
        "ip", "address", "del", f"{lab.nodes[node].address(RAIL)}/24", "dev", device
    )
    lab.nodes[node].run("ip", "address", "add", f"{address}/24", "dev", device)
    yield


@contextmanager
def behind_a_nat(lab: Lab, node: int, address: str) -> Iterator[None]:
    """Puts a NAT before the node's port, and ends the connections over the port."""
    with ExitStack() as stack:
        try:
            stack.enter_context(translating(lab, node, RAIL, address))
        except LabCommandError as error:
            if "nft" not in str(error):
                raise
            pytest.skip(f"no NAT in this kernel: {error}")
        lab.reset(node, RAIL)
        yield


Change = Callable[[Lab, int, str], AbstractContextManager[None]]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "pause_s", [0.001, pytest.param(0.0001, marks=pytest.mark.long)], ids=["steady", "fast"]
)
@pytest.mark.parametrize("change", [moved, behind_a_nat], ids=["new address", "NAT"])
def test_a_rail_comes_back_from_a_new_address_in_a_flood(
    jobs: Any, make_lab: Any, eventually: Any, change: Change, pause_s: float
) -> None:
    """A new address is told to the peer over the other rail; that of a NAT is told by no rank."""
    lab = make_lab(2, nodes=3)
    stream = Stream(jobs, lab)
    accepting = acceptor(stream)
    connecting = 1 - accepting
    listeners = [listener(stream, accepting, rail) for rail in range(lab.rails)]
    address = f"10.77.{RAIL + 1}.{connecting + 100}"
    with flooded(lab, listeners, pause_s) as flooder:
        strangers = lab.nodes[STRANGERS]
        eventually("many strangers", lambda: connections(strangers) >= MANY)
        with change(lab, connecting, address):

            def is_back() -> bool:
                arrived = ["src", listeners[RAIL], "dst", address]
                return bool(connections(lab.nodes[accepting], *arrived)) and stream.is_up(RAIL)

            eventually(f"rail {RAIL} UP from {address}", is_back, REJOIN_S)
            assert flooder.poll() is None, "the flood has ended"
            steps = stream.steps()
            eventually("further steps", lambda: stream.steps() > steps + 20, REJOIN_S)
    stream.finish()
