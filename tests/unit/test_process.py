"""The engine shared in a process, and the thread that forwards the engine's log."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading

import pytest

from r2serve import _core
from r2serve.config import Config
from r2serve.errors import InvalidArgumentError
from r2serve.process import acquire, release

FORGETFUL = """
import sys
from r2serve.config import Config
from r2serve.process import acquire

process = acquire(Config(rails="127.0.0.1"), 0, None, share=True)
print(process.info.ports[0].port, flush=True)
sys.stdin.readline()
"""


def test_the_last_release_ends_the_log_thread() -> None:
    config = Config(rails="127.0.0.1")
    process = acquire(config, 0, None, share=True)
    assert acquire(config, 0, None, share=True) is process
    release(process)
    assert process.log.is_alive()
    release(process)
    assert not process.log.is_alive()


def test_a_forked_child_has_a_separate_engine() -> None:
    config = Config(rails="127.0.0.1")
    process = acquire(config, 0, None, share=True)
    child = os.fork()
    if child == 0:
        own = acquire(config, 0, None, share=True)
        release(process)
        release(own)
        os._exit(own is process or own.log.is_alive())
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert process.log.is_alive()
    release(process)


def test_the_listeners_of_a_host_share_a_window_of_ports() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        first = taken.getsockname()[1]
        last = min(65535, first + 50)
        config = Config(rails="127.0.0.1,127.0.0.2", ports=f"{first}-{last}")
        ends = [acquire(config, rank, None, share=False) for rank in range(2)]
        try:
            for place, address in enumerate(("127.0.0.1", "127.0.0.2")):
                ports = {end.info.ports[place].port for end in ends}
                assert len(ports) == len(ends), f"a port each at {address}"
                assert all(first <= port <= last for port in ports)
                assert place or first not in ports, "occupied by another program"
        finally:
            for end in ends:
                release(end)
        full = Config(rails="127.0.0.1", ports=str(first))
        with pytest.raises(InvalidArgumentError, match=r"R2CCL_PORTS.* at 127\.0\.0\.1"):
            acquire(full, 0, None, share=False)


def test_a_rail_may_be_a_reserve_and_share_a_unit() -> None:
    rail = {
        "kind": "tcp",
        "name": "rail0@node0",
        "device": "",
        "local_address": "127.0.0.1",
        "remote_address": "127.0.0.1",
        "remote_port": 1,
        "verbs_device": "",
        "verbs_port": 0,
    }
    engine = _core.Engine(Config().core_fields(), 7)
    try:
        rails = [rail, rail | {"reserve": True, "unit": "cage 0"}]
        engine.add_peer(9, "rank 1", bytes(32), rails)
        told = [(each["reserve"], each["unit"], each["been_up"]) for each in engine.rails()]
        assert told == [(False, "", False), (True, "cage 0", False)]
    finally:
        engine.close(0.0)


def test_a_process_without_close_ends_cleanly_while_strangers_connect() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FORGETFUL],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        dropped = threading.Event()
        ended = threading.Event()

        def knock() -> None:
            """Each connection is a line in the child's log."""
            while not ended.is_set():
                with (
                    contextlib.suppress(OSError),
                    socket.create_connection(("127.0.0.1", port), timeout=10) as connection,
                ):
                    connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
                    with contextlib.suppress(ConnectionResetError):
                        connection.recv(1)
                    dropped.set()

        stranger = threading.Thread(target=knock)
        stranger.start()
        try:
            assert dropped.wait(120)
            _, errors = child.communicate("\n", timeout=300)
        finally:
            child.kill()
            ended.set()
            stranger.join()
    assert child.returncode == 0, errors
    assert "127.0.0.1" in errors  # the last log lines are forwarded, too
    assert "leaked" not in errors
