"""Connections from outside the job to a rail's port have no effect on the job."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import time
from collections.abc import Callable

import pytest
from real_rails import wait_until_up
from timely import timely

from r2serve._core import wire_version

HANDSHAKE_TIMEOUT_S = 1.0
MAGIC = b"R2H1"
HELLO = 1
HELLO_BYTES = 156
HANDSHAKE_VERSION = 2


def hello(version: int, frames: int = wire_version) -> bytes:
    """Returns a hello frame with a valid header and random contents, without the job's key."""
    header = struct.pack("<4sHHBBH", MAGIC, version, frames, HELLO, 0, 0)
    return header + os.urandom(HELLO_BYTES - len(header))


def connect(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, timeout=60)


def is_dropped(connection: socket.socket, patience_s: float = 60.0) -> bool:
    """Whether the other end closes within `patience_s`, without sending a byte."""
    connection.settimeout(patience_s)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def say_nothing(address: tuple[str, int]) -> None:
    with connect(address):
        pass


def say_garbage(address: tuple[str, int]) -> None:
    with connect(address) as connection:
        connection.sendall(os.urandom(4096))
        assert is_dropped(connection)


def say_another_version(address: tuple[str, int]) -> None:
    with connect(address) as connection:
        connection.sendall(hello(version=77))
        assert is_dropped(connection)
    with connect(address) as connection:
        connection.sendall(hello(HANDSHAKE_VERSION, frames=wire_version - 1))
        assert is_dropped(connection)


def say_hello_without_the_key(address: tuple[str, int]) -> None:
    with connect(address) as connection:
        connection.sendall(hello(HANDSHAKE_VERSION))
        assert is_dropped(connection)


def reset_in_the_middle(address: tuple[str, int]) -> None:
    with connect(address) as connection:
        connection.sendall(hello(HANDSHAKE_VERSION)[:50])
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def drip(address: tuple[str, int]) -> None:
    """Sends the hello byte by byte, too slowly to complete within the handshake timeout."""
    with connect(address) as connection:
        began = time.monotonic()
        try:
            for byte in hello(HANDSHAKE_VERSION):
                connection.sendall(bytes([byte]))
                time.sleep(HANDSHAKE_TIMEOUT_S / 8)
        except (ConnectionResetError, BrokenPipeError):
            took_s = time.monotonic() - began
            what = f"a slow-loris was dropped after {took_s:.1f} s"
            timely(lambda: took_s < 8 * HANDSHAKE_TIMEOUT_S, what, 0)
            return
    pytest.fail("a slow-loris was not dropped")


def a_thousand(address: tuple[str, int]) -> None:
    """Opens 1000 silent connections at the same time, and waits until all are dropped."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(address)) for _ in range(1000)]
        for connection in connections:
            assert is_dropped(connection)


# Attacks by name: function of the attack, and text of the log line.
ATTACKS: dict[str, tuple[Callable[[tuple[str, int]], None], str]] = {
    "silence": (say_nothing, "the peer closed the connection"),
    "garbage": (say_garbage, "wrong first bytes"),
    "another version": (say_another_version, "its handshake has version 77, ours 2"),
    "no key": (say_hello_without_the_key, "dropped a connection"),
    "reset": (reset_in_the_middle, "the peer closed the connection"),
    "slow-loris": (drip, "timed out"),
    "a thousand": (a_thousand, "too many unauthenticated connections"),
}


@pytest.fixture
def job(jobs) -> list:
    ranks = jobs.start(
        "stream.py",
        2,
        config={"handshake_timeout_ms": int(HANDSHAKE_TIMEOUT_S * 1000), "spin_us": 20},
        pause_s=0.001,
    )
    for rank in ranks:
        rank.hear(60)
    wait_until_up(ranks)
    return ranks


def targets(ranks: list) -> list[tuple[str, int]]:
    """Returns every rail port of both ranks; each rank reports the other rank's ports."""
    found = set()
    for rank in ranks:
        for rail in rank.ask({"do": "rails"}):
            host, _, port = rail["remote"].rpartition(":")
            found.add((host, int(port)))
    assert len(found) == 4
    return sorted(found)


def downs(rank) -> list[str]:
    """Returns the losses of rails that were in use."""
    texts = [event["text"] for event in rank.ask({"do": "events"})]
    return [text for text in texts if text.startswith(("UP->DOWN", "SUSPECT->DOWN"))]


def finish(ranks: list) -> None:
    ranks[0].ask({"do": "stop"})
    steps = {rank.hear(60)["steps"] for rank in ranks}
    assert len(steps) == 1
    for rank in ranks:
        rank.wait(60)


@pytest.mark.timeout(240)
def test_unauthenticated_connections_change_nothing(job, eventually, show) -> None:
    before = [rank.ask({"do": "resources"}) for rank in job]
    epochs = [[rail["epoch"] for rail in rank.ask({"do": "rails"})] for rank in job]
    for (attack, _), address in itertools.product(ATTACKS.values(), targets(job)):
        steps = job[0].ask({"do": "steps"})
        attack(address)
        eventually("further steps", lambda steps=steps: job[0].ask({"do": "steps"}) > steps)
    for rank, held in zip(job, before, strict=True):
        # Accepted connections are closed after the handshake timeout at the latest.
        eventually(
            "as many descriptors as before",
            lambda rank=rank, held=held: (
                rank.ask({"do": "resources"})["descriptors"] <= held["descriptors"]
            ),
        )
        assert rank.ask({"do": "resources"})["threads"] == held["threads"]
        assert downs(rank) == []
        for name, (_, words) in ATTACKS.items():
            eventually(
                f"a line about {name} in the log",
                lambda rank=rank, words=words: any(
                    words in line for line in rank.ask({"do": "log"})
                ),
            )
    assert epochs == [[rail["epoch"] for rail in rank.ask({"do": "rails"})] for rank in job]
    show(f"{len(ATTACKS)} attacks on {len(targets(job))} ports, no rail went DOWN")
    finish(job)


@pytest.mark.timeout(300)
def test_a_rail_rejoins_among_unauthenticated_connections(job, eventually) -> None:
    """A rank of the job connects despite many unauthenticated connections to the same ports."""
    addresses = targets(job)
    with contextlib.ExitStack() as stack:
        for rail in (0, 1):
            for address in addresses:
                for _ in range(40):
                    stack.enter_context(connect(address))
            for rank in job:
                rank.ask({"do": "inject", "rail": rail, "fault": "carrier_loss"})
                rank.ask({"do": "inject", "rail": rail, "fault": "heal"})
            eventually(
                f"rail {rail} is UP again",
                lambda rail=rail: all(
                    rank.ask({"do": "rails"})[rail]["state"] == "UP" for rank in job
                ),
                patience_s=60,
            )
    finish(job)
