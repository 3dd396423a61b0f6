"""`r2serve relay -- COMMAND`: environment, exit status, and the end with the relay."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from timely import timely

from r2serve.errors import ConfigError
from r2serve.relay import wrapped
from r2serve.relay.client import Carried
from r2serve.relay.parent import RelayProcess
from r2serve.variables import MANAGEMENT, RELAY

pytestmark = pytest.mark.slow

LONG_S = 60.0
HERE = Carried("127.7.8.0", 1)
READY = """
import json, sys, time
def say(**what): print(json.dumps(what), flush=True)
say(node=1, prefix="127.7.8.0", address="127.7.8.2", pid=1)
"""
Start = Callable[[str], RelayProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    """Returns a function that starts a program in place of a relay, and waits until it is ready."""
    with ExitStack() as stack:

        def made(program: str) -> RelayProcess:
            relay = RelayProcess([sys.executable, "-c", READY + program])
            stack.callback(relay.close)
            relay.wait_ready(LONG_S)
            return relay

        yield made


def is_zombie(number: int) -> bool:
    return psutil.Process(number).status() == psutil.STATUS_ZOMBIE


def run(relay: RelayProcess, code: str) -> int:
    return wrapped.run(relay, [sys.executable, "-c", code], 29500, "10.0.0.2")


def test_the_command_gets_virtual_addresses() -> None:
    env = wrapped.environment(HERE, 29500, {"PYTHONPATH": "/a", "X": "1"}, "10.0.0.2")
    assert env.pop("PYTHONPATH") == f"{wrapped.IN_COMMAND}:/a"
    assert env == {
        "X": "1",
        RELAY: "127.7.8.0/1",
        MANAGEMENT: "10.0.0.2",
        "MASTER_ADDR": "127.7.8.1",
        "MASTER_PORT": "29500",
    }
    words = ["torchrun", "--master-addr={master}", "{address}", "{other}"]
    assert wrapped.filled(words, HERE) == [
        "torchrun",
        "--master-addr=127.7.8.1",
        "127.7.8.2",
        "{other}",
    ]


def test_the_status_is_that_of_the_command(start: Start) -> None:
    relay = start("sys.stdin.read()")
    assert run(relay, "raise SystemExit(7)") == 7
    assert run(relay, "import os; os.kill(os.getpid(), 9)") == 128 + signal.SIGKILL
    with pytest.raises(ConfigError, match=r"COMMAND: /no/such: No such file"):
        wrapped.run(relay, ["/no/such"], 29500, None)


def test_the_command_ends_with_the_relay(start: Start) -> None:
    relay = start("sys.stdin.readline(); say(failed='no rail', error='PeerLostError')")
    relay.started()
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    assert run(relay, stubborn) == wrapped.FAILED


def test_a_command_that_fails_before_the_loss_is_told_has_the_status_of_the_loss(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss resets the connections of the command, which may then end by itself."""
    monkeypatch.setattr(wrapped, "TELLS_S", LONG_S)
    told = tmp_path / "number"
    relay = start(f"""
import pathlib
told = pathlib.Path({str(told)!r})
while not told.exists() or pathlib.Path("/proc", told.read_text() or "self").exists():
    time.sleep(0.01)
say(failed="no rail", error="PeerLostError")
sys.stdin.read()
""")
    code = f"import os, pathlib; pathlib.Path({str(told)!r}).write_text(str(os.getpid())); exit(3)"
    assert run(relay, code) == wrapped.FAILED


def test_processes_of_a_command_that_ends_at_once_are_killed(start: Start, tmp_path: Path) -> None:
    relay = start("sys.stdin.readline(); say(failed='no rail', error='PeerLostError')")
    told = tmp_path / "number"
    child = (
        "import os, pathlib, signal, time; signal.signal(15, signal.SIG_IGN); "
        f"pathlib.Path({str(told)!r}).write_text(str(os.getpid())); time.sleep(600)"
    )
    code = f"""
import pathlib, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {child!r}])
time.sleep(600)
"""

    def lose() -> None:
        while not told.exists() or not told.read_text():
            time.sleep(0.01)
        relay.started()

    losing = threading.Thread(target=lose)
    losing.start()
    assert run(relay, code) == wrapped.FAILED
    losing.join()
    number = int(told.read_text())
    timely(lambda: not psutil.pid_exists(number) or is_zombie(number), "the end of the child")


WRAPPER = """
import fcntl, os, signal, sys, termios
from r2serve.relay import wrapped
from r2serve.relay.parent import RelayProcess
if os.isatty(0): fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # leader of a session, in the foreground
for number in (1, 2, 10, 12, 15):  # whatever the tests inherit
    signal.signal(number, signal.SIG_IGN if str(number) in sys.argv[3:] else signal.SIG_DFL)
relay = RelayProcess([sys.executable, "-c", sys.argv[1]])
relay.wait_ready(60)
status = wrapped.run(relay, [sys.executable, "-c", sys.argv[2]], 29500, None)
relay.close()
sys.exit(status)
"""
COUNTS = """
import signal, sys, time
counts = {1: 0, 2: 0, 10: 0, 12: 0, 15: 0}
def count(number, _):
    counts[number] += 1
    print(number, counts[number], flush=True)
    if number == 15: sys.exit(sum(counts.values()))
for number in counts:
    if signal.getsignal(number) is not signal.SIG_IGN: signal.signal(number, count)
print("ready", flush=True)
while True: time.sleep(1)
"""


@pytest.fixture
def wrapper() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Returns a function that starts a wrapper in a session of its own.

    A terminal at its standard input becomes the terminal of the session.
    """

    def end(process: subprocess.Popen[str]) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    with ExitStack() as stack:

        def made(*ignored: int, **options: Any) -> subprocess.Popen[str]:
            words = [READY + "sys.stdin.read()", COUNTS, *(str(int(each)) for each in ignored)]
            process = subprocess.Popen(
                [sys.executable, "-c", WRAPPER, *words],
                text=True,
                start_new_session=True,
                **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE} | options,
            )
            stack.callback(end, process)
            return process

        yield made


def test_signals_to_the_wrapper_alone_reach_the_command(
    wrapper: Callable[..., subprocess.Popen[str]],
) -> None:
    process = wrapper()
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    users = (signal.SIGUSR1, signal.SIGUSR2)
    for number in (signal.SIGHUP, signal.SIGINT, *users, signal.SIGTERM):
        process.send_signal(number)
        assert process.stdout.readline() == f"{int(number)} 1\n"
    assert process.wait(LONG_S) == 5


def test_an_ignored_signal_stays_ignored(wrapper: Callable[..., subprocess.Popen[str]]) -> None:
    process = wrapper(signal.SIGHUP, signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
    assert process.stdout.readline() == "15 1\n"
    assert process.wait(LONG_S) == 1


def test_an_interrupt_of_a_terminal_reaches_the_command_once(
    wrapper: Callable[..., subprocess.Popen[str]],
) -> None:
    ours, theirs = pty.openpty()
    process = wrapper(stdin=theirs, stdout=theirs)
    os.close(theirs)
    with os.fdopen(ours, "r+b", buffering=0) as terminal:
        said = b""

        def hear(text: bytes) -> None:
            nonlocal said
            while text not in said:
                more = terminal.read(1024)
                assert more, said
                said += more

        hear(b"ready")
        terminal.write(b"\x03")
        hear(b"2 1")
        process.send_signal(signal.SIGTERM)
        hear(b"15 1")
        assert process.wait(LONG_S) == 2
        assert b"2 2" not in said


def test_a_signal_before_the_command_has_started_reaches_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = start("sys.stdin.read()")
    real = subprocess.Popen

    def popen(*args: Any, **options: Any) -> Any:
        made = real(*args, **options)
        os.kill(os.getpid(), signal.SIGTERM)
        return made

    monkeypatch.setattr(subprocess, "Popen", popen)
    assert run(relay, "import time; time.sleep(600)") == 128 + signal.SIGTERM


def test_torch_in_the_command_listens_at_the_virtual_address(tmp_path: Path) -> None:
    """A sitecustomize of the environment runs, too, and a process without torch pays nothing."""
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['NEXT'] = 'ran'\n")
    env = wrapped.environment(HERE, 29500, {"PYTHONPATH": str(tmp_path)}, None)

    def told(code: str) -> list[str]:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        return done.stdout.split()

    names = "print(torch.distributed.TCPStore.__module__, os.environ['NEXT'])"
    assert told(f"import os, torch.distributed; {names}") == [
        "r2serve.relay.torch_seams",
        "ran",
    ]
    assert told(f"import os, torch; {names}") == ["r2serve.relay.torch_seams", "ran"]
    assert told("import sys; print('torch' in sys.modules, 'r2serve' in sys.modules)") == [
        "False",
        "False",
    ]
