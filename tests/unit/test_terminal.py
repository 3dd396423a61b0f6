"""Commands on a terminal of 80 columns, in a pipe, and with input that is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from pairs import Pair
from rich.console import Console
from rich.table import Table
from timely import timely

from r2serve.cli import main
from r2serve.demo import report as demo_report
from r2serve.observe.journal import Group, Journal, Latency, RailCounters
from r2serve.observe.port_state import Wanted, ports_of, state_of
from r2serve.observe.tables import groups_table, journal_table, links_table, ports_table
from r2serve.observe.watch import Worker
from r2serve.terminal import INTERRUPTED, WIDE, FiniteRange, console, is_wide, result_option

NARROW = 80


def rail(number: int, peer: int, **fields: Any) -> RailCounters:
    values = {
        "name": f"rail{number}@node12",
        "kind": "verbs",
        "peer": f"rank {peer}",
        "device": f"mlx5_bond_{number}:1",
        "state": "UP",
        "cause": "none",
        "verdict": "none",
        "slow": False,
        "epoch": 3,
        "may_carry": True,
        "graceful_close": False,
        "peer_engine": peer,
    } | fields
    counters = ("since_ns", "tx_bytes", "rx_bytes", "data_tx_bytes", "replayed_chunks")
    counters += ("hedged_chunks", "last_tx_ns", "round_trip_ns", "rate")
    return RailCounters(**(dict.fromkeys(counters, 123456789) | values))


def lost(number: int, peer: int) -> RailCounters:
    return rail(number, peer, state="CONNECTING", cause="address_loss", verdict="remote NIC")


def workers(count: int = 8, peers: int = 8, rails: int = 8) -> list[Worker]:
    """Workers with rails to peers of other nodes; rail 3 is lost, and rail 5 is slow."""
    latency = Latency(12345, 10**12, 10**9, (0,) * 24)
    group = Group("pp:0:decode", 1, 0, 8, "", 0, 0, 0, 10**12, False, {"reduce_scatter": latency})
    made = []
    for number in range(count):
        ends = [
            lost(each, peer) if each == 3 else rail(each, peer, slow=each == 5)
            for peer in range(8, 8 + peers)
            for each in range(rails)
        ]
        read = Journal(process=number, label=f"rank {number}", rails=ends, groups=[group])
        made.append(Worker(f"{number}-a", Path(), 0, read))
    return made


def lines_of(table: Table, width: int = NARROW) -> list[str]:
    shown = Console(width=width, color_system=None)
    with shown.capture() as captured:
        shown.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]


# ---- tables ----


def test_a_large_node_has_a_line_per_port_at_80_columns() -> None:
    """A line a port, not a line a rail (512 here), and no cut names such as `rai…`."""
    lines = lines_of(ports_table(workers(), wide=False))
    assert len(lines) == 1 + 8
    assert max(map(len, lines)) <= NARROW
    assert lines[4].split() == [
        "rail3@node12",
        "mlx5_bond_3:1",
        "DOWN",
        *("0", "of", "64"),
        *("address_loss,", "remote", "NIC"),
    ]
    assert lines[6].split() == ["rail5@node12", "mlx5_bond_5:1", "UP,", "slow", "64", "of", "64"]


@pytest.mark.parametrize("width", [40, 60, NARROW, 100, 160])
def test_no_table_cuts_a_cell(width: int) -> None:
    some = workers(1, 1)
    whole_from = [
        (links_table(some, wide=False), NARROW),
        (ports_table(some, wide=False, rates=True), NARROW),
        (ports_table(some, wide=True), WIDE),
        (journal_table(some[0].journal, wide=True), 120),
        (journal_table(some[0].journal, wide=False), 84),
        (groups_table(some), NARROW),
    ]
    for table, least in whole_from:
        lines = lines_of(table, width)
        assert max(map(len, lines)) <= width
        whole = "".join("".join(line.split()) for line in lines)
        assert "…" not in whole
        name = "pp:0:decode" if table is whole_from[-1][0] else "rail3@node12"
        assert any(name in line for line in lines) or width < least


@pytest.mark.parametrize("make", [links_table, ports_table])
def test_rails_are_chosen_by_state_name_port_and_peer(make: Any) -> None:
    few = workers(2, 2, 4)

    def shown(wanted: Wanted) -> list[str]:
        lines = lines_of(make(few, wanted, wide=False))[1:]
        return sorted({word for line in lines for word in line.split() if "@" in word})

    everything = [f"rail{number}@node12" for number in range(4)]
    assert shown(Wanted()) == everything
    assert shown(Wanted(down=True)) == ["rail3@node12"]
    for name in ("rail1@node12", "rail1", "mlx5_bond_1:1", "mlx5_bond_1"):
        assert shown(Wanted(rails=(name,))) == ["rail1@node12"]
    verbs = few[0].journal.rails
    verbs[:] = [replace(each, device=f"eth{each.device[-3]}/{each.device}") for each in verbs]
    for name in ("eth1/mlx5_bond_1:1", "mlx5_bond_1:1", "mlx5_bond_1", "eth1"):
        assert shown(Wanted(rails=(name,))) == ["rail1@node12"]
    assert shown(Wanted(rails=("rail1", "rail3"))) == ["rail1@node12", "rail3@node12"]
    assert shown(Wanted(rails=("rail1",), down=True)) == []
    assert shown(Wanted(peers=("rank 9",))) == shown(Wanted(peers=("9",))) == everything
    assert shown(Wanted(peers=("rank 7",))) == []


def test_a_port_has_the_worst_state_and_every_reason_once() -> None:
    ends = [rail(0, 1), lost(0, 2), lost(0, 3), rail(0, 4, state="DOWN", cause="carrier_loss")]
    (port,) = ports_of([Worker("a", Path(), 0, Journal(process=1, rails=ends))])
    assert (port.state, port.up, port.links) == ("DOWN", 1, 4)
    assert list(port.whys) == ["address_loss, remote NIC", "carrier_loss"]
    assert port.peers == {"rank 1", "rank 2", "rank 3", "rank 4"}


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({"state": "UP"}, "UP"),
        ({"state": "UP", "slow": True}, "UP, slow"),
        ({"state": "SUSPECT"}, "SUSPECT"),
        ({"state": "CONNECTING"}, "DOWN"),  # a lost rail is mostly on its way back
        ({"state": "PROBATION"}, "DOWN"),
        ({"state": "CONNECTING", "been_up": False}, "never up"),
    ],
)
def test_a_lost_rail_is_down_until_it_is_back(fields: dict[str, Any], state: str) -> None:
    assert state_of(rail(0, 1, **fields)) == state


def test_events_are_chosen_by_rail_and_peer() -> None:
    wanted = Wanted(rails=("rail1",), peers=("2",))
    assert wanted.has_event("rail1@node0", "rank 2")
    assert not wanted.has_event("rail1@node0", "rank 1")
    assert not wanted.has_event("rail0@node0", "rank 2")
    assert not wanted.has_event("", "")
    assert Wanted().has_event("", "")


def test_a_name_in_a_journal_is_no_markup() -> None:
    strange = replace(rail(0, 1), name="[red]x", device="[/]", peer="[bold]")
    one = [Worker("a", Path(), 0, Journal(process=1, label="[blink]", rails=[strange]))]
    for table in (ports_table(one, wide=False), links_table(one, wide=False)):
        assert "[red]x" in lines_of(table)[1]
    assert "[blink]" in lines_of(journal_table(one[0].journal, wide=False))[0]


# ---- commands ----


def ask(*words: str, columns: int = NARROW) -> Result:
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(main, words)


@pytest.mark.parametrize(
    "words",
    [
        ["rails"],
        ["rails", "--links"],
        ["top", "--count", "1"],
        ["journal", "show"],
        ["topo"],
        ["doctor"],
        ["config"],
    ],
)
def test_every_command_is_readable_at_80_columns(
    pair: Pair, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("R2CCL_JOURNAL_DIR", str(pair.folder))
    pair.cut_and_heal(0)
    done = ask(*words)
    assert "…" not in done.output
    # A line of an event or an option is one line, however long its value is.
    tables = [line for line in done.output.splitlines() if not line.startswith(("20", "R2CCL_"))]
    assert max(map(len, tables)) <= NARROW
    if words[0] in ("rails", "top", "journal"):
        assert any(line.startswith("rail0@node0") for line in tables) or "--links" in words


def test_the_rails_command_takes_choices(pair: Pair) -> None:
    def rails(*words: str) -> list[str]:
        done = ask("rails", "--journal-dir", str(pair.folder), "--json", *words)
        return [one["name"] for one in json.loads(done.stdout)]

    pair.engine.inject(1, "carrier_loss")
    timely(lambda: "rail1@node0" in rails("--down"), "rail 1 is down")
    assert rails("--rail", "rail0") == ["rail0@node0"]
    assert rails("--peer", "rank 1") == ["rail0@node0", "rail1@node0"]
    assert rails("--peer", "7") == []
    none = ask("rails", "--journal-dir", str(pair.folder), "--peer", "7")
    assert "no rail matches" in none.stderr


def test_a_pipe_gets_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    piped = console()
    assert piped.width > 1000
    assert not is_wide(piped)
    monkeypatch.setenv("COLUMNS", "120")
    assert (console().width, is_wide(console())) == (120, True)


def test_events_of_a_folder_without_journals_are_an_error(tmp_path: Path) -> None:
    """Without a journal, silence with status 0 would look like a node without events."""
    done = ask("events", "--journal-dir", str(tmp_path / "nowhere"))
    assert done.exit_code == 1
    assert "no running worker has a journal" in done.stderr


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["topo", "--picture", "/nonexistent/x.svg"], "/nonexistent/x.svg cannot be written"),
        (["sim", "--json", "/nonexistent/x"], "/nonexistent/x cannot be written"),
        (["demo", "--json", "/nonexistent/x"], "/nonexistent/x cannot be written"),
        (["demo", "hour", "--json", "/nonexistent/x"], "/nonexistent/x cannot be written"),
        (["journal", "dump", "-o", "/nonexistent/x"], "/nonexistent/x cannot be written"),
        (["sim", "--seed", "-1"], "-1 is not in the range"),
        (["sim", "--seed", "99999999999999999999999"], "is not in the range"),
        (["sidecar", "--stuck-after", "nan"], "nan is not a finite number"),
        (["sidecar", "--stuck-after", "inf"], "inf is not a finite number"),
        (["drill", "slow", "--rail", "rail0", "--mbit", "nan"], "nan is not a finite number"),
        (["drill", "slow", "--rail", "rail0", "--mbit", "-3"], "-3.0 is not in the range"),
        (["sidecar", "--tls-cert", "x"], "--tls-cert and --tls-key belong together"),
        (["sidecar", "--allowed-host", "a.*"], "a wildcard must be the whole first label"),
    ],
)
def test_wrong_input_is_named(words: list[str], complaint: str) -> None:
    done = ask(*words)
    assert done.exit_code in (1, 2)
    assert complaint in " ".join(done.output.split())
    assert done.exception is None or isinstance(done.exception, SystemExit)


def test_a_result_file_is_left_as_it_is(tmp_path: Path) -> None:
    @click.command()
    @result_option("--json", "file")
    def command(file: Path | None) -> None:
        click.echo(f"{file}")

    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("results of an hour")
    for path in (old, new):
        done = CliRunner().invoke(command, ["--json", str(path)])
        assert done.output == f"{path}\n"
    assert old.read_text() == "results of an hour"
    assert not new.exists()
    assert CliRunner().invoke(command, ["--json", str(tmp_path)]).exit_code == 2
    assert CliRunner().invoke(command, []).output == "None\n"


def test_a_finite_range_takes_numbers() -> None:
    assert FiniteRange(0, min_open=True).convert("2.5", None, None) == 2.5


def test_problems_of_the_demo_are_no_markup() -> None:
    """Rich takes an extra, as in `pip install '.[vllm]'`, for markup unless the text is escaped."""
    shown = Console(width=200, color_system=None)
    report = demo_report.Report("a lab", errors=["install '.[vllm]'"])
    with shown.capture() as captured:
        demo_report.render(report, shown)
    assert "install '.[vllm]'" in captured.get()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ctrl_c_ends_a_sidecar_that_has_named_its_address(tmp_path: Path) -> None:
    """The address is named at the start, and Ctrl-C prints no `Aborted!`."""
    command = [sys.executable, "-c", "from r2serve.cli import main; main()", "sidecar"]
    command += ["--port", "0", "--journal-dir", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = [process.stderr.readline() for _ in range(2)]
        place = said[1].removeprefix("listening: ").strip()

        def answers() -> bool:
            with urllib.request.urlopen(f"{place}/livez", timeout=60) as answer:
                return bool(answer.status == 200)

        timely(answers, "the sidecar answers at the named address")
        os.kill(process.pid, signal.SIGINT)
        rest = process.stderr.read()
    assert said[0] == f"journals: {tmp_path}\n"
    assert (process.returncode, rest) == (INTERRUPTED, "")
