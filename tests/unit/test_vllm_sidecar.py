"""The sidecar started by an engine: address, start and end."""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from pairs import Pair
from timely import timely

from r2serve.engines import flag, sidecar
from r2serve.errors import ConfigError
from r2serve.observe.sidecar import cli, server
from r2serve.observe.watch import Watch

pytestmark = pytest.mark.slow


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Records the command lines instead of starting processes."""
    commands: list[list[str]] = []

    def note(command: list[str], **_: Any) -> None:
        commands.append(command)

    monkeypatch.setattr(sidecar.subprocess, "Popen", note)
    monkeypatch.setattr(sidecar, "_started", False)
    monkeypatch.setenv("R2CCL_JOURNAL_DIR", str(tmp_path))
    monkeypatch.setenv(sidecar.VARIABLE, "0")
    monkeypatch.delenv(sidecar.VARIABLE)
    return commands


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(exit_on_error=False)
    flag.add_to(made)
    return made


@pytest.mark.parametrize(
    ("text", "where", "url"),
    [
        ("8199", ("127.0.0.1", 8199), "http://127.0.0.1:8199"),
        ("0.0.0.0:81", ("0.0.0.0", 81), "http://0.0.0.0:81"),
        ("[::1]:81", ("::1", 81), "http://[::1]:81"),
    ],
)
def test_the_flag_sets_the_address(
    started: list[list[str]], text: str, where: tuple[str, int], url: str
) -> None:
    assert sidecar.url() is None
    parser().parse_args(["--r2serve-sidecar", text])
    assert os.environ[sidecar.VARIABLE] == text
    assert sidecar.address(text) == where
    assert sidecar.url() == url


@pytest.mark.parametrize("text", ["", "x", "host:", "0", "65536", "host:-1", "host:8 "])
def test_an_invalid_address_is_refused_by_the_parser(started: list[list[str]], text: str) -> None:
    with pytest.raises(argparse.ArgumentError, match="HOST:"):
        parser().parse_args(["--r2serve-sidecar", text])
    with pytest.raises(ConfigError):
        sidecar.address(text)
    assert sidecar.VARIABLE not in os.environ


def test_the_sidecar_starts_once_and_watches_the_engine(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sidecar.start_once()
    assert started == []
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    monkeypatch.setenv(sidecar.VARIABLE, str(port))
    sidecar.start_once()
    sidecar.start_once()
    (command,) = started
    for word, value in (
        ("--host", "127.0.0.1"),
        ("--port", str(port)),
        ("--journal-dir", str(tmp_path)),
        ("--until", str(os.getpid())),
    ):
        assert command[command.index(word) + 1] == value
    assert (tmp_path / "sidecar.log").exists()


def test_an_unwritable_log_costs_a_warning_only(
    started: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    (tmp_path / "sidecar.log").symlink_to("/etc/hostname")
    monkeypatch.setenv(sidecar.VARIABLE, "8199")
    sidecar.start_once()
    assert len(started) == 1
    assert "the sidecar's messages appear here: " in caplog.text


def test_the_sidecar_waits_for_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_AGAIN_S", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        threading.Timer(0.3, taken.close).start()
        with server.bound("127.0.0.1", port, 90.0) as bound:
            assert bound.getsockname()[1] == port


def test_the_wait_for_the_port_is_limited(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server, "_AGAIN_S", 0.02)
    owner = re.escape(f"is taken by process {os.getpid()} ")
    taken = socket.create_server(("127.0.0.1", 0))
    with taken, pytest.raises(click.ClickException, match=owner):
        server.bound("127.0.0.1", taken.getsockname()[1], 3.0)  # the owner is asked for 1 s
    assert re.search(f"{owner}.*tries again for 3 s", capsys.readouterr().err)


def test_an_engine_names_the_owner_of_its_sidecars_port(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("R2CCL_SERVING_ENGINE", "second")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv(sidecar.VARIABLE, str(port))
        sidecar.start_once()
    (command,) = started  # waits for the port
    assert command[command.index("--engine") + 1] == "second"
    assert f"127.0.0.1:{port} is taken by process {os.getpid()} " in caplog.text


def test_the_engine_is_named_after_its_first_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R2CCL_SERVING_ENGINE", "")
    flag.name_engine()
    assert os.environ["R2CCL_SERVING_ENGINE"] == str(os.getpid())
    monkeypatch.setenv("R2CCL_SERVING_ENGINE", "llama-a")
    flag.name_engine()
    assert os.environ["R2CCL_SERVING_ENGINE"] == "llama-a"


def test_the_log_of_a_sidecar_stays_short(tmp_path: Path) -> None:
    path = tmp_path / "sidecar.log"
    with path.open("ab") as log:
        log.write(b"x" * cli.LOG_BYTES)
        log.flush()
        cli.cut_log(log.fileno(), path)
        assert path.stat().st_size == cli.LOG_BYTES
        log.write(b"x")
        log.flush()
        cli.cut_log(log.fileno(), path)
        log.write(b"next")
    expected = b"earlier lines are dropped: the log was longer than 256 KiB\nnext"
    assert path.read_bytes() == expected


@pytest.mark.parametrize("own_log", [False, True])
def test_the_messages_of_the_engine_stay_whole(tmp_path: Path, own_log: bool) -> None:
    """A sidecar whose log cannot be opened inherits the engine's standard error, a file, too."""
    path, log = tmp_path / "engine.log", tmp_path / "sidecar.log"
    path.write_bytes(b"x" * 2 * cli.LOG_BYTES)
    if own_log:
        log.touch()
    with path.open("ab") as inherited:
        cli.cut_log(inherited.fileno(), log)
    assert path.stat().st_size == 2 * cli.LOG_BYTES


def test_without_journals_no_sidecar_starts(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(sidecar.VARIABLE, "8199")
    monkeypatch.delenv("R2CCL_JOURNAL_DIR")
    sidecar.start_once()
    assert started == []
    assert "R2CCL_JOURNAL_DIR is not set" in caplog.text


def test_a_sidecar_without_r2ccl_is_said_to_be_useless_once(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sidecar.say_if_useless()
    assert caplog.text == ""
    monkeypatch.setenv(sidecar.VARIABLE, "8199")
    for _ in range(2):
        sidecar.say_if_useless()
    assert started == []
    assert caplog.text.count("--r2serve-sidecar needs --distributed-backend r2ccl") == 1


def test_the_sidecar_ends_after_the_engine_and_the_workers(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "IDLE_S", 0.3)
    monkeypatch.setattr(cli, "LOOK_S", 0.05)
    serving: Any = SimpleNamespace(should_exit=False)
    engine = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watch = Watch(pair.folder)
    ending = threading.Thread(target=cli._end_after, args=(engine.pid, watch, serving), daemon=True)
    ending.start()
    ending.join(0.6)
    assert not serving.should_exit  # the engine is alive
    watch.look()
    engine.kill()
    engine.wait()
    ending.join(0.6)
    assert not serving.should_exit  # a worker is alive
    pair.close()

    def ends() -> bool:
        watch.look()
        return bool(serving.should_exit)

    timely(ends, "the end of the sidecar", within_s=60, every_s=0.05)
