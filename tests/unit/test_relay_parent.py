"""The process that starts a relay: readiness, typed errors, the end in either order."""

from __future__ import annotations

import os
import queue
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from r2serve.errors import ConfigError, PeerClosedError, PeerLostError, StartupTimeoutError
from r2serve.relay import parent
from r2serve.relay.lines import NoRelayError, Refused
from r2serve.relay.parent import Failure, RelayProcess, command

LONG_S = 60.0
READY = """
import json, sys
def say(**what): print(json.dumps(what), flush=True)
say(node=1, prefix="127.7.8.0", address="127.7.8.2", pid=1)
"""

Start = Callable[[str], RelayProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    """Returns a function that starts a program in place of a relay."""
    with ExitStack() as stack:

        def made(program: str) -> RelayProcess:
            relay = RelayProcess([sys.executable, "-c", program])
            stack.callback(relay.close)
            return relay

        yield made


def test_a_ready_relay_tells_its_address(start: Start) -> None:
    relay = start(READY + "sys.stdin.read()")
    relay.wait_ready(LONG_S)
    assert (relay.node, relay.prefix, relay.address) == (1, "127.7.8.0", "127.7.8.2")
    assert relay.address_of(0) == "127.7.8.1"


def test_other_lines_of_the_relay_are_passed_over(start: Start) -> None:
    relay = start("print('a banner', flush=True)" + READY + "sys.stdin.read()")
    relay.wait_ready(LONG_S)
    assert relay.node == 1


def test_the_relay_ends_with_the_pipe_and_hears_of_the_start(start: Start) -> None:
    relay = start(READY + "assert sys.stdin.readline() == 'up\\n'; sys.stdin.read()")
    ended: queue.Queue[Failure] = queue.Queue()
    relay.on_end(ended.put)
    relay.wait_ready(LONG_S)
    relay.started()
    relay.close()
    assert relay._process.returncode == 0
    assert ended.empty(), "an end in order is no failure"


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (PeerClosedError, PeerClosedError),
        (ConfigError, ConfigError),
        (Refused, ConfigError),
        (NoRelayError, NoRelayError),
    ],
)
def test_a_failure_keeps_its_class(
    start: Start, raised: type[Failure], kind: type[Exception]
) -> None:
    name = parent.kind_of(raised("node 0 has ended")).__name__
    relay = start(READY + f"say(failed='node 0 has ended', error='{name}'); sys.exit(70)")
    ended: queue.Queue[Failure] = queue.Queue()
    relay.on_end(ended.put)
    error = ended.get(timeout=LONG_S)
    assert type(error) is kind
    assert str(error) == "node 0 has ended"
    with pytest.raises(kind):
        relay.wait_ready(LONG_S)


def test_a_failure_is_told_before_the_relay_has_ended(start: Start) -> None:
    """Connections are reset at the end, so a user of them would fail first."""
    relay = start(READY + "say(failed='node 0 is lost', error='PeerLostError'); sys.stdin.read()")
    ended: queue.Queue[Failure] = queue.Queue()
    relay.on_end(ended.put)
    assert str(ended.get(timeout=LONG_S)) == "node 0 is lost"
    assert relay._process.poll() is None
    relay.close()
    assert ended.empty(), "told once"


def test_a_killed_relay_is_a_lost_peer(start: Start) -> None:
    relay = start("import os; os.kill(os.getpid(), 9)")
    with pytest.raises(PeerLostError, match="status -9"):
        relay.wait_ready(LONG_S)
    ended: queue.Queue[Failure] = queue.Queue()
    relay.on_end(ended.put)  # later than the end
    assert isinstance(ended.get(timeout=LONG_S), PeerLostError)


def test_a_relay_that_is_not_ready_in_time(start: Start) -> None:
    relay = start("import sys; sys.stdin.read()")
    with pytest.raises(StartupTimeoutError, match=r"after 0\.1 s"):
        relay.wait_ready(0.1)


def test_the_command_names_the_place_of_the_node() -> None:
    argv = command(1, 2, "10.0.0.1,10.0.1.1", 29500)
    assert argv[0] == sys.executable
    assert " ".join(argv[3:]) == (
        "relay --node 1 --nodes 2 --master 10.0.0.1,10.0.1.1 --port 29500"
    )
    assert command(1, 2, "10.0.0.1", 1, 30.0)[-2:] == ["--timeout-s", "30"]
    assert command(1, 2, "10.0.0.1", 1, others_may_end=True)[-1] == "--others-may-end"


def test_a_forked_child_does_not_keep_the_relay(start: Start) -> None:
    relay = start(READY + "sys.stdin.read()")
    relay.wait_ready(LONG_S)
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    try:
        relay.close()
        assert relay._process.returncode == 0, "the child kept the pipe"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
