"""`r2serve rails`, `r2serve events` and `r2serve top` beside running engines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from pairs import Pair
from timely import timely

from r2serve.cli import main
from r2serve.journal_folder import journal_folder


def ask(pair: Pair, name: str, *words: str) -> Result:
    runner = CliRunner(env={"COLUMNS": "200"})
    return runner.invoke(main, [name, "--journal-dir", str(pair.folder), *words])


def test_rails_are_shown_and_a_peer_without_a_rail_fails_the_command(pair: Pair) -> None:
    shown = timely(
        lambda: (result := ask(pair, "rails")).output.count(" UP ") == 2 and result,
        "both rails are shown as UP",
    )
    assert shown.exit_code == 0, shown.output
    rails = json.loads(ask(pair, "rails", "--json").stdout)
    assert [(rail["label"], rail["name"]) for rail in rails] == [
        ("rank 0", "rail0@node0"),
        ("rank 0", "rail1@node0"),
    ]
    assert {rail["state"] for rail in rails} <= {"UP", "SUSPECT"}
    for rail in (0, 1):
        pair.engine.inject(rail, "carrier_loss")
    pair.engine.journal_bytes()  # writes the current state into the file
    timely(lambda: ask(pair, "rails").exit_code == 1, "the command fails without a rail")
    gone = ask(pair, "rails")
    assert "rank 0: no rail to rank 1 is left" in gone.stderr


def test_events_are_printed_as_lines(pair: Pair) -> None:
    pair.cut_and_heal(1)
    ends = "rank 0 rail_state rail1@node0 to rank 1: PROBATION->UP"
    assert [line for line in ask(pair, "events").stdout.splitlines() if line.endswith(ends)]

    def last_three() -> bool:
        """An event may come between the two commands, for example of a host short of CPU."""
        lines = ask(pair, "events", "--last", "3").stdout.splitlines()
        assert len(lines) == 3
        return lines == ask(pair, "events").stdout.splitlines()[-3:]

    timely(last_three, "the last three events are printed")
    events = [json.loads(line) for line in ask(pair, "events", "--json").stdout.splitlines()]
    assert [event["text"] for event in events if event["kind"] == "injected"] == [
        "carrier_loss",
        "heal",
    ]
    assert ask(pair, "events", "--last", "0").stdout == ""


def test_events_are_followed(pair: Pair) -> None:
    words = ["events", "-f", "--last", "1", "--journal-dir", str(pair.folder)]
    command = [sys.executable, "-c", "from r2serve.cli import main; main()", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline()
            pair.cut_and_heal(1)
            while not process.stdout.readline().endswith("rail1@node0 to rank 1: carrier_loss\n"):
                continue
            while "PROBATION->UP" not in process.stdout.readline():
                continue
        finally:
            process.kill()


def test_top_shows_workers_rails_and_events(pair: Pair) -> None:
    pair.cut_and_heal(0)
    shown = timely(
        lambda: "ok  1 workers on" in (text := ask(pair, "top", "--count", "2").output) and text,
        "a healthy worker is shown",
    )
    assert shown.count("rail0@node0") >= 2
    assert "PROBATION->UP" in shown

    def healthy() -> Any:
        summary = json.loads(ask(pair, "top", "--json", "--count", "1").stdout)
        return summary["status"] == "ok" and summary

    summary = timely(healthy, "the summary's status is ok")
    assert len(summary["rails"]) == 2


def test_the_journal_folder_comes_from_argument_variable_or_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("R2CCL_JOURNAL_DIR", "/run/there")
    assert journal_folder(None) == Path("/run/there")
    assert journal_folder(Path("/here")) == Path("/here")
    monkeypatch.delenv("R2CCL_JOURNAL_DIR")
    assert journal_folder(None).parts[:3] == ("/", "dev", "shm")
