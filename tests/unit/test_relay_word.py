"""The word of relays about the end of processes, with loopback connections in place of carried."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import Any

import pytest
from timely import timely

from r2serve.relay import word
from r2serve.relay.client import Carried, PortTakenError
from r2serve.relay.word import Words

AT_ONCE = struct.pack("ii", 1, 0)
"""Value of SO_LINGER with which a close is a reset."""


@dataclass
class PlayedCarried:
    """A relay whose mirrors are there at once, after ``taken`` ports that are taken."""

    address: str = "127.7.9.1"
    taken: int = 0

    def has(self, address: str) -> bool:
        return address.startswith("127.7.9.")

    def sync(self) -> None:
        if self.taken:
            self.taken -= 1
            raise PortTakenError("listeners without a mirror: port 7 on node 1 is taken")


class Process:
    """A process of another node: its listener, and the connection held by this one."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.7.9.2", 0))
        self.endpoint = f"127.7.9.2:{self.listener.getsockname()[1]}"

    def take(self) -> None:
        self.connection, _ = self.listener.accept()

    def end(self, *, in_order: bool = True) -> None:
        if not in_order:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
        self.connection.close()
        self.listener.close()


class Told:
    """Words with what they have told, and a relay that may be gone."""

    def __init__(self) -> None:
        self.engines: list[int] = []
        self.relay_lives = True
        carried: Any = PlayedCarried()
        self.words = Words(carried, self.engines.append, lambda: self.relay_lives)

    def process(self, *engines: int) -> Process:
        """Returns a process with these engines, held by a connection."""
        process = Process()
        for engine in engines:
            self.words.hold(process.endpoint, engine)
        process.take()
        return process

    def ends_in_order(self, engine: int) -> None:
        """Ends a further process, which is told after all ends before."""
        self.process(engine).end()
        timely(lambda: engine in self.engines, "the end of the further process is told")


def test_the_orderly_end_of_a_process_is_told_for_all_its_engines() -> None:
    told = Told()
    told.process(5, 6).end()
    timely(lambda: sorted(told.engines) == [5, 6], "both engines are told")
    told.ends_in_order(7)
    assert sorted(told.engines) == [5, 6, 7]


def test_a_reset_is_no_word() -> None:
    """A relay resets its connections after the loss of the other relay."""
    told = Told()
    told.process(5).end(in_order=False)
    told.ends_in_order(6)
    assert told.engines == [6]


def test_the_end_of_the_own_relay_is_no_word() -> None:
    told = Told()
    process = told.process(5)
    told.relay_lives = False
    process.end()
    timely(lambda: process.endpoint not in told.words._engines, "the end is seen")
    told.relay_lives = True
    told.ends_in_order(6)
    assert told.engines == [6]


def test_connections_of_other_nodes_are_held() -> None:
    carried: Any = PlayedCarried(taken=2)
    words = Words(carried, lambda _: None, lambda: True)
    address, _, port = words.endpoint.rpartition(":")
    assert address == carried.address
    with socket.create_connection((address, int(port))) as one:
        timely(lambda: len(words._accepted) == 1, "the connection is accepted")
        one.shutdown(socket.SHUT_WR)
        timely(lambda: not words._accepted, "the ended connection is dropped")


def test_too_many_taken_ports_are_an_error() -> None:
    carried: Any = PlayedCarried(taken=word.ATTEMPTS)
    with pytest.raises(PortTakenError):
        Words(carried, lambda _: None, lambda: True)


@pytest.mark.parametrize("endpoint", ["", "10.0.0.2:7", "127.7.9.1:7", "127.7.9.2:port"])
def test_a_wrong_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"virtual address|invalid literal"):
        Told().words.hold(endpoint, 5)


def test_a_process_that_could_not_be_held_may_be_held_later() -> None:
    told = Told()
    process = Process()
    process.listener.close()
    with pytest.raises(ConnectionRefusedError):
        told.words.hold(process.endpoint, 5)
    address, port = process.endpoint.split(":")
    process.listener = socket.create_server((address, int(port)))
    told.words.hold(process.endpoint, 5)
    process.take()
    process.end()
    timely(lambda: told.engines == [5], "the end is told")


def test_a_relay_that_does_not_exist_does_not_live() -> None:
    assert not word.relay_lives(Carried("127.7.9.0", 0))


def test_without_a_relay_there_is_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("R2SERVE_RELAY", raising=False)
    assert word.endpoint() == ""
    word.hold([("127.7.9.2:7", 5)])
