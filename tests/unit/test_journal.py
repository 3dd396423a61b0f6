"""The journal reader: against journals that the core wrote, and against broken bytes."""

from __future__ import annotations

import itertools
import json
import re
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from r2serve import _core
from r2serve.config import Config
from r2serve.errors import StartupTimeoutError
from r2serve.observe import journal
from r2serve.observe.cli import command
from r2serve.observe.trace import chrome_trace
from r2serve.process import Process

_HEADER_BYTES, _RAIL_BYTES, _RECORD_BYTES = 64, 136, 56


class Pair:
    """Two engines of this process that are joined by two loopback rails."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        here = Config(rails="127.0.0.1,127.0.0.2", node="here", journal_dir=str(folder))
        there = Config(rails="127.0.0.1,127.0.0.2", node="there")
        self.ends = [Process(here, 0, None), Process(there, 1, None)]
        for own, peer in (self.ends, self.ends[::-1]):
            own.add_peer(peer.info, f"rank {peer.rank_hint}", own.rank_hint)
        for own, peer in (self.ends, self.ends[::-1]):
            connect(own.engine, peer.info.process)
        self.engine = self.ends[0].engine

    def wait_for_state(self, rail: int, state: str) -> None:
        deadline = time.monotonic() + 20
        while self.engine.rails()[rail]["state"] != state:
            assert time.monotonic() < deadline, self.engine.rails()[rail]
            time.sleep(0.005)

    def close(self) -> None:
        for end in self.ends:
            end.engine.close(0.0)


def connect(engine: _core.Engine, process: int) -> None:
    """Opens the rails; that they are up is waited for elsewhere."""
    try:
        engine.connect([process], 0.0)
    except StartupTimeoutError:
        return


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    for rail in (0, 1):
        made.wait_for_state(rail, "UP")
    yield made
    made.close()


def test_file_and_memory_say_the_same(pair: Pair) -> None:
    (path,) = pair.folder.glob("r2ccl-*.journal")
    in_memory = journal.parse(pair.engine.journal_bytes())
    on_file = journal.read(path)
    assert path.name == f"r2ccl-{on_file.process}.journal"
    assert [rail.name for rail in on_file.rails] == ["rail0@node0", "rail1@node0"]
    assert [rail.name for rail in in_memory.rails] == ["rail0@node0", "rail1@node0"]
    assert on_file.events[: len(in_memory.events)] == in_memory.events


def test_rails_are_told_with_their_counters(pair: Pair) -> None:
    for rail in journal.parse(pair.engine.journal_bytes()).rails:
        assert (rail.kind, rail.peer, rail.state, rail.epoch) == ("tcp", "rank 1", "UP", 1)
        assert rail.tx_bytes > 0, "a rail is probed before it is UP"
        assert rail.rx_bytes > 0
        assert rail.data_tx_bytes == rail.replayed_chunks == rail.hedged_chunks == 0


def test_every_move_of_a_rail_is_an_event(pair: Pair) -> None:
    before = time.monotonic_ns()
    cut_and_healed(pair)
    events = journal.parse(pair.engine.journal_bytes()).events
    events = [event for event in events if event.time_ns >= before]
    assert {event.kind for event in events} == {"rail_state"}
    assert {(event.rail, event.peer) for event in events} == {("rail1@node0", "rank 1")}
    assert [event.text for event in events] == [
        "UP->DOWN injected",
        "DOWN->FENCING injected",
        "FENCING->CONNECTING injected",
        "CONNECTING->PROBATION",
        "PROBATION->UP",
    ]
    assert [event.epoch for event in events] == [1, 1, 1, 2, 2]
    assert [event.time_ns for event in events] == sorted(event.time_ns for event in events)


def test_a_journal_stays_readable_when_its_writer_is_gone(pair: Pair) -> None:
    (path,) = pair.folder.glob("r2ccl-*.journal")
    pair.close()
    assert len(journal.read(path).rails) == 2


# --- the command ----------------------------------------------------------------------------------


def cut_and_healed(pair: Pair) -> None:
    pair.engine.inject(1, "cut")
    pair.engine.inject(1, "heal")
    deadline = time.monotonic() + 20
    while pair.engine.rails()[1]["epoch"] < 2 or pair.engine.rails()[1]["state"] != "UP":
        assert time.monotonic() < deadline
        time.sleep(0.005)


def ask(*words: str) -> str:
    done = CliRunner(env={"COLUMNS": "160"}).invoke(command, words)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_journal_is_shown(pair: Pair) -> None:
    cut_and_healed(pair)
    text = ask("show", str(pair.folder))
    assert re.search(r"rail1@node0 +rank 1 +tcp +UP", text), text
    assert "UP->DOWN injected" in text
    last = ask("show", "--last", "1", str(pair.folder))
    assert "PROBATION->UP" in last
    assert "UP->DOWN" not in last


def test_all_of_a_journal_is_dumped(pair: Pair) -> None:
    cut_and_healed(pair)
    (path,) = pair.folder.glob("r2ccl-*.journal")
    [dumped] = json.loads(ask("dump", str(path)))
    assert dumped == json.loads(ask("show", "--json", str(path)))[0]
    assert dumped["process"] == journal.read(path).process
    assert [rail["name"] for rail in dumped["rails"]] == ["rail0@node0", "rail1@node0"]
    assert "UP->DOWN injected" in [event["text"] for event in dumped["events"]]


def test_a_trace_has_the_states_of_each_rail_one_after_the_other(
    pair: Pair, tmp_path: Path
) -> None:
    cut_and_healed(pair)
    output = tmp_path / "trace.json"
    ask("dump", "--chrome-trace", "-o", str(output), str(pair.folder))
    events = json.loads(output.read_text())["traceEvents"]
    names = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    track = next(tid for tid, name in names.items() if name == "rail1@node0 to rank 1")
    spans = [event for event in events if event["ph"] == "X" and event["tid"] == track]
    assert [span["name"] for span in spans][-4:] == ["FENCING", "CONNECTING", "PROBATION", "UP"]
    for span, after in itertools.pairwise(spans):
        assert span["ts"] + span["dur"] == pytest.approx(after["ts"])


def test_a_stall_is_on_the_trace_while_it_lasted() -> None:
    stall = journal.Event(
        time_ns=5_000_000,
        kind="stall",
        rail="",
        peer="",
        epoch=0,
        comm=7,
        call=3,
        value=2_000_000,
        detail=4096,
        text="",
    )
    events = chrome_trace([journal.Journal(process=11, events=[stall])])["traceEvents"]
    [span] = [event for event in events if event["ph"] == "X"]
    assert (span["name"], span["ts"], span["dur"]) == ("stall", 3000.0, 2000.0)
    assert span["args"] == {"communicator": 7, "call": 3, "bytes": 4096}


def test_where_no_journal_is_the_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = CliRunner().invoke(command, ["show", str(tmp_path)])
    assert (none.exit_code, none.output) == (
        1,
        f"Error: no readable r2ccl-*.journal in {tmp_path}\n",
    )
    monkeypatch.delenv("R2CCL_JOURNAL_DIR", raising=False)
    unset = CliRunner().invoke(command, ["show"])
    assert unset.exit_code == 1
    assert "R2CCL_JOURNAL_DIR" in unset.output


def test_a_broken_journal_does_not_hide_the_others(pair: Pair) -> None:
    broken = pair.folder / "r2ccl-1.journal"
    broken.write_bytes(b"nothing")
    both = CliRunner().invoke(command, ["dump", str(pair.folder)])
    assert both.exit_code == 0
    assert "rail1@node0" in both.output
    assert f"{broken}: 7 bytes are too few for a journal" in both.output
    alone = CliRunner().invoke(command, ["dump", str(broken)])
    assert (alone.exit_code, alone.output) == (
        1,
        f"Error: {broken}: 7 bytes are too few for a journal\n",
    )


# --- bytes by hand --------------------------------------------------------------------------------


def record(sequence: int, kind: int = 2, rail: int = 0) -> bytes:
    return struct.pack(
        "<QqBBBBIIIQQQ", sequence, 10 * sequence, kind, 2, 4, 1, rail, 3, 5, 77, 1000, 64
    )


def build(count: int, records: list[bytes], *, rails: int = 1, magic: bytes = b"R2JOURNL") -> bytes:
    header = struct.pack("<8sIIIIIIQ24x", magic, 2, 4242, 2, len(records), rails, 0, count)
    rail = struct.pack(
        "<32s32sBBBBIQQQQQqqQ", b"rail0@node1", b"rank 3", 0, 4, 1, 2, 9, 1, 2, 3, 4, 5, 6, 7, 8
    )
    assert (len(header), len(rail)) == (_HEADER_BYTES, _RAIL_BYTES)
    return header + rail + bytes(_RAIL_BYTES) + b"".join(records)


def test_fields_are_read_where_the_layout_puts_them() -> None:
    read = journal.parse(build(1, [record(1), bytes(_RECORD_BYTES)]))
    assert read.process == 4242
    assert read.rails == [
        journal.RailCounters(
            name="rail0@node1",
            kind="tcp",
            peer="rank 3",
            state="DOWN",
            cause="carrier",
            verdict="remote NIC",
            epoch=9,
            tx_bytes=1,
            rx_bytes=2,
            data_tx_bytes=3,
            replayed_chunks=4,
            hedged_chunks=5,
            last_tx_ns=6,
            round_trip_ns=7,
            rate=8,
        )
    ]
    assert read.events == [
        journal.Event(
            time_ns=10,
            kind="stall",
            rail="rail0@node1",
            peer="rank 3",
            epoch=3,
            comm=77,
            call=5,
            value=1000,
            detail=64,
            text="",
        )
    ]


def test_a_move_is_told_in_words() -> None:
    (event,) = journal.parse(build(1, [record(1, kind=1)])).events
    assert event.text == "UP->DOWN carrier"


def test_a_verdict_and_a_change_of_speed_are_told_in_words() -> None:
    verdict, speed = journal.parse(build(2, [record(1, kind=6), record(2, kind=7)])).events
    assert (verdict.kind, verdict.text) == ("verdict", "transient")
    assert (speed.kind, speed.text, speed.value) == ("speed", "slow", 1000)


def test_the_ring_is_read_from_its_oldest_record() -> None:
    ring = [record(5), record(6), record(3), record(4)]
    assert [event.time_ns for event in journal.parse(build(6, ring)).events] == [30, 40, 50, 60]


def test_a_record_that_is_being_overwritten_is_left_out() -> None:
    ring = [record(5), record(2), record(3), record(4)]  # 6 is on its way into the second place
    assert [event.time_ns for event in journal.parse(build(6, ring)).events] == [30, 40, 50]


def test_an_event_of_no_rail_has_no_rails_name() -> None:
    (event,) = journal.parse(build(1, [record(1, rail=0xFFFFFFFF)])).events
    assert (event.rail, event.peer) == ("", "")


def test_what_a_newer_core_may_add_is_told_as_unknown() -> None:
    (event,) = journal.parse(build(1, [record(1, kind=99)])).events
    assert event.kind == "unknown-99"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "0 bytes are too few"),
        (b"R2JOURNL", "8 bytes are too few"),
        (build(1, [record(1)], magic=b"R3JOURNL"), "not a journal of version 2"),
        (build(1, [record(1)])[:-1], "truncated"),
        (build(1, [record(1)], rails=3), "truncated"),
    ],
)
def test_what_is_no_journal_says_so(data: bytes, words: str) -> None:
    with pytest.raises(journal.JournalError, match=words):
        journal.parse(data)
