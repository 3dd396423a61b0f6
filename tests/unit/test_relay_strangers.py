"""Connections to the meeting of relays that say nothing: a limited number at the same time."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from test_relay_meeting import LONG_S, Joining, all_free, info
from timely import timely

from r2serve.relay import meeting
from r2serve.relay.meeting import Host
from r2serve.relay.strangers import Strangers

MOST = 3


@pytest.fixture
def pairs() -> Iterator[Callable[[], tuple[socket.socket, socket.socket]]]:
    """Makes connections; the first end is that of node 0."""
    with ExitStack() as stack:

        def make() -> tuple[socket.socket, socket.socket]:
            ends = socket.socketpair()
            for end in ends:
                end.settimeout(LONG_S)
                stack.enter_context(end)
            return ends

        yield make


def test_the_oldest_connection_goes_first(
    pairs: Callable[[], tuple[socket.socket, socket.socket]], said: Callable[[], list[str]]
) -> None:
    strangers = Strangers(2)
    made = [pairs() for _ in range(4)]
    strangers.admit(made[0][0])
    strangers.admit(made[1][0])
    strangers.leave(made[0][0])  # its node is known
    strangers.admit(made[2][0])
    assert len(strangers) == 2
    strangers.admit(made[3][0])
    assert len(strangers) == 2
    assert made[1][1].recv(1) == b"", "the oldest stranger is ended"
    for own, other in (made[0], made[2], made[3]):
        own.sendall(b"x")
        assert other.recv(1) == b"x"
    strangers.admit(pairs()[0])
    assert len([line for line in said() if "say nothing" in line]) == 1


def test_a_connection_that_has_ended_is_no_error(
    pairs: Callable[[], tuple[socket.socket, socket.socket]],
) -> None:
    strangers = Strangers(1)
    gone = pairs()[0]
    strangers.admit(gone)
    gone.close()
    strangers.admit(pairs()[0])
    assert len(strangers) == 1
    strangers.leave(gone)  # a second time


def test_a_crowd_of_strangers_has_a_limited_number_of_threads_and_ends_no_meeting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meeting, "MOST_STRANGERS", MOST)
    monkeypatch.setattr(meeting, "SILENCE_S", 10 * LONG_S)  # else silence ends them, too
    before = guests()
    own = Host(["127.0.0.1"], 0, 3, info(1), free=all_free)
    with ExitStack() as stack:
        stack.callback(own.close)
        waiting = Joining(own.port, 1)
        with own._changed:
            assert own._changed.wait_for(lambda: own._joined, LONG_S)
        at = ("127.0.0.1", own.port)
        crowd = [
            stack.enter_context(socket.create_connection(at, LONG_S)) for _ in range(10 * MOST)
        ]
        for each in crowd[:-MOST]:
            while each.recv(4096):
                pass  # the greeting of node 0
        what = "a thread of each stranger and of the waiting relay"
        timely(lambda: len(guests() - before) == MOST + 1, what)
        other = Joining(own.port, 2)
        assert own.gather(LONG_S) == other.done().outcome == waiting.done().outcome


def guests() -> set[threading.Thread]:
    """Returns the threads of connections to meetings, also those of other tests."""
    return {thread for thread in threading.enumerate() if thread.name == "relay-guest"}
