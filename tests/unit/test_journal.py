"""The journal reader: journals written by the core, and malformed bytes."""

from __future__ import annotations

import itertools
import json
import re
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from pairs import Pair
from ports import free_port
from timely import timely

from r2serve import Communicator
from r2serve.config import Config
from r2serve.observe import files, journal
from r2serve.observe.choice import Choice
from r2serve.observe.cli import command
from r2serve.observe.trace import chrome_trace
from r2serve.process import Process

_HEADER_BYTES, _RAIL_BYTES, _GROUP_BYTES, _RECORD_BYTES = 192, 192, 2032, 56


def test_journal_file_and_memory_are_equal(pair: Pair) -> None:
    (path,) = pair.folder.glob("r2ccl-*.journal")
    in_memory = journal.parse(pair.engine.journal_bytes())
    on_file = journal.read(path)
    assert path.name.startswith(f"r2ccl-{on_file.process}-")
    assert [rail.name for rail in on_file.rails] == ["rail0@node0", "rail1@node0"]
    assert [rail.name for rail in in_memory.rails] == ["rail0@node0", "rail1@node0"]
    assert on_file.events[: len(in_memory.events)] == in_memory.events


def test_rails_have_counters(pair: Pair) -> None:
    for rail in journal.parse(pair.engine.journal_bytes()).rails:
        assert (rail.kind, rail.peer, rail.epoch) == ("tcp", "rank 1", 1)
        assert rail.state in ("UP", "SUSPECT"), "a machine short of CPU suspects rails"
        assert rail.tx_bytes > 0, "a rail is probed before it is UP"
        assert rail.rx_bytes > 0
        assert rail.data_tx_bytes == rail.replayed_chunks == rail.hedged_chunks == 0


def is_doubt(event: journal.Event) -> bool:
    """True for a change to SUSPECT and back, as on a machine short of CPU."""
    return event.text.startswith(("UP->SUSPECT", "SUSPECT->UP"))


def test_every_state_change_of_a_rail_is_an_event(pair: Pair) -> None:
    before = time.monotonic_ns()
    pair.cut_and_heal(1)
    events = journal.parse(pair.engine.journal_bytes()).events
    events = [event for event in events if event.time_ns >= before]
    drills = [event for event in events if event.kind == "injected"]
    assert [event.text for event in drills] == ["carrier_loss", "heal"]
    events = [event for event in events if event.kind == "rail_state" and not is_doubt(event)]
    assert {(event.rail, event.peer) for event in drills + events} == {("rail1@node0", "rank 1")}
    assert [event.text.replace("SUSPECT->DOWN", "UP->DOWN") for event in events] == [
        "UP->DOWN injected",
        "DOWN->FENCING injected",
        "FENCING->CONNECTING injected",
        "CONNECTING->PROBATION",
        "PROBATION->UP",
    ]
    assert [event.epoch for event in events] == [1, 1, 1, 2, 2]
    assert [event.time_ns for event in events] == sorted(event.time_ns for event in events)


def test_a_journal_stays_readable_after_its_writer_ends(pair: Pair) -> None:
    (path,) = pair.folder.glob("r2ccl-*.journal")
    assert abs(time.monotonic_ns() - journal.read(path).heartbeat_ns) < 60e9
    assert files.is_written(path)
    files.prune(pair.folder, keep=0)  # keeps the journal of a live process
    pair.close()
    closed = journal.read(path)
    assert (len(closed.rails), closed.heartbeat_ns) == (2, 0)


def test_a_journal_converts_to_the_time_of_day(pair: Pair) -> None:
    pair.cut_and_heal(1)
    (path,) = pair.folder.glob("r2ccl-*.journal")
    read = journal.read(path)
    last = [one for one in read.events if (one.kind, one.rail) == ("rail_state", "rail1@node0")][-1]
    assert abs(read.clock_ns(last.time_ns) - time.time_ns()) < 300e9
    assert abs(read.clock_ns(read.rails[1].since_ns) - read.clock_ns(last.time_ns)) < 1e6
    assert read.label == "rank 0"


def test_each_engine_of_a_process_has_a_journal(tmp_path: Path) -> None:
    config = Config(rails="127.0.0.1", journal_dir=str(tmp_path))
    engines = [Process(config, rank, None).engine for rank in (0, 1)]
    found = sorted(tmp_path.glob(journal.PATTERN))
    assert sorted(journal.read(path).label for path in found) == ["rank 0", "rank 1"]
    for engine in engines:
        engine.close(0.0)


def test_calls_are_counted_by_collective_and_duration(tmp_path: Path) -> None:
    folders = [tmp_path / "0", tmp_path / "1"]
    port = free_port()

    def work(rank: int) -> None:
        folders[rank].mkdir()
        config = Config(rails="127.0.0.1", node="per-rank", journal_dir=str(folders[rank]))
        with Communicator.standalone(
            "127.0.0.1", port, rank, 2, name="tp:0", config=config, share_engine=False
        ) as group:
            for _ in range(5):
                group.all_reduce(torch.ones(100))
            group.barrier()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(work, (0, 1)))
    for rank, folder in enumerate(folders):
        (path,) = folder.glob(journal.PATTERN)
        [group] = journal.read(path).groups
        assert (group.name, group.rank, group.ranks, group.closed) == ("tp:0", rank, 2, True)
        assert (group.call, group.failed_calls) == ("", 0)
        assert {name: one.calls for name, one in group.latencies.items()} == {
            "all_reduce": 5,
            "barrier": 1,
        }
        reduced = group.latencies["all_reduce"]
        assert sum(reduced.buckets) == 5
        assert reduced.bytes == 5 * 400
        longest = max(at for at, many in enumerate(reduced.buckets) if many)
        assert 0 < reduced.total_ns <= 5 * journal.BUCKETS_S[longest] * 1e9


# ---- the command ----


def ask(*words: str) -> str:
    done = CliRunner(env={"COLUMNS": "160"}).invoke(command, words)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_journal_is_shown(pair: Pair) -> None:
    pair.cut_and_heal(1)
    text = ask("show", str(pair.folder))
    assert re.search(r"rail1@node0 +rank 1 +tcp +(UP|SUSPECT)", text), text
    assert "UP->DOWN injected" in text
    (path,) = pair.folder.glob("r2ccl-*.journal")

    def last_alone() -> bool:
        """An event may come between the two commands, for example of a host short of CPU."""
        before = journal.read(path).record_count
        shown = ask("show", "--last", "1", str(pair.folder))
        read = journal.read(path)
        assert "UP->DOWN" not in shown
        return read.record_count == before and read.events[-1].text in shown

    timely(last_alone, "the last event is shown")


def test_all_of_a_journal_is_dumped(pair: Pair) -> None:
    pair.cut_and_heal(1)
    (path,) = pair.folder.glob("r2ccl-*.journal")
    [dumped] = json.loads(ask("dump", str(path)))
    shown = json.loads(ask("show", "--json", str(path)))[0]
    assert set(dumped) == set(shown)  # the counters change between the two commands
    assert dumped["events"] == shown["events"][: len(dumped["events"])]
    assert dumped["process"] == journal.read(path).process
    assert [rail["name"] for rail in dumped["rails"]] == ["rail0@node0", "rail1@node0"]
    assert "UP->DOWN injected" in [event["text"] for event in dumped["events"]]


def test_a_trace_has_the_states_of_each_rail_one_after_the_other(
    pair: Pair, tmp_path: Path
) -> None:
    pair.cut_and_heal(1)
    output = tmp_path / "trace.json"
    ask("dump", "--chrome-trace", "-o", str(output), str(pair.folder))
    events = json.loads(output.read_text())["traceEvents"]
    names = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    track = next(tid for tid, name in names.items() if name == "rail1@node0 to rank 1")
    spans = [event for event in events if event["ph"] == "X" and event["tid"] == track]
    assert "FENCING CONNECTING PROBATION UP" in " ".join(span["name"] for span in spans)
    for span, after in itertools.pairwise(spans):
        assert span["ts"] + span["dur"] == pytest.approx(after["ts"])


def test_a_stall_is_a_span_on_the_trace() -> None:
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
        text="all_reduce",
    )
    events = chrome_trace([journal.Journal(process=11, events=[stall])])["traceEvents"]
    [span] = [event for event in events if event["ph"] == "X"]
    assert (span["name"], span["ts"], span["dur"]) == ("stall", 3000.0, 2000.0)
    assert span["args"] == {
        "communicator": 7,
        "collective": "all_reduce",
        "call": 3,
        "bytes": 4096,
    }


def test_a_folder_without_a_journal_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = CliRunner().invoke(command, ["show", str(tmp_path)])
    assert (none.exit_code, none.output) == (
        1,
        f"Error: no readable r2ccl-*.journal in {tmp_path}\n",
    )
    for words, folder in (
        (["show"], tmp_path / "of the variable"),
        (["dump", "--journal-dir", str(tmp_path / "named")], tmp_path / "named"),
    ):
        monkeypatch.setenv("R2CCL_JOURNAL_DIR", str(tmp_path / "of the variable"))
        missing = CliRunner().invoke(command, words)
        assert (missing.exit_code, missing.output) == (
            1,
            f"Error: {folder} is no folder with journals, and no file\n",
        )


def test_journals_of_the_folder_of_all_commands_are_read(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command without an argument reads the default folder, as all other commands do."""
    monkeypatch.setenv("R2CCL_JOURNAL_DIR", str(pair.folder))
    assert "rail0@node0" in ask("show")
    monkeypatch.setenv("R2CCL_JOURNAL_DIR", "/nonexistent")
    assert "rail0@node0" in ask("dump", "--journal-dir", str(pair.folder))


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


# ---- journals made of bytes ----


def record(sequence: int, kind: int = 2, rail: int = 0) -> bytes:
    return struct.pack(
        "<QqBBBBIIIQQQ", sequence, 10 * sequence, kind, 2, 4, 1, rail, 3, 5, 77, 1000, 64
    )


def build(count: int, records: list[bytes], *, rails: int = 1, magic: bytes = b"R2JOURNL") -> bytes:
    header = struct.pack(
        "<8s8IQqqq32s24x64s",
        magic,
        *(journal.VERSION, 4242, 2, 1, len(records), rails, 1, 99),
        count,
        *(1_000, 5_000_000, 7_000),
        b"rank 0",
        b"node-a",
    )
    rail = struct.pack(
        "<32s32s32sBBBBIBBBBIqQQQQQqqQBBBBI",
        b"rail0@node1",
        b"rank 3",
        b"eth7",
        *(0, 4, 1, 2, 9, 1, 1, 0, 1, 77),
        *range(10, 19),
        *(3, 1, 7, 2),
        4_000,
    )
    group = struct.pack("<32sQIIqQQQ6B2x", b"tp:0", 77, 1, 2, 50, 3, 4, 5, 8, 0, 2, 3, 4, 9)
    group += struct.pack("<27Q", 6, 60_000, 600, 1, 5, *[0] * 22) + bytes(8 * 216)
    assert (len(header), len(rail), len(group)) == (_HEADER_BYTES, _RAIL_BYTES, _GROUP_BYTES)
    return header + rail + bytes(_RAIL_BYTES) + group + b"".join(records)


def test_fields_are_read_at_the_offsets_of_the_layout() -> None:
    read = journal.parse(build(1, [record(1), bytes(_RECORD_BYTES)]))
    assert read.process == 4242
    assert read.host == "node-a"
    assert read.rails == [
        journal.RailCounters(
            name="rail0@node1",
            kind="tcp",
            peer="rank 3",
            device="eth7",
            state="DOWN",
            cause="carrier_loss",
            verdict="remote NIC",
            slow=True,
            epoch=9,
            since_ns=10,
            may_carry=True,
            graceful_close=False,
            peer_engine=77,
            tx_bytes=11,
            rx_bytes=12,
            data_tx_bytes=13,
            replayed_chunks=14,
            hedged_chunks=15,
            last_tx_ns=16,
            round_trip_ns=17,
            rate=18,
            been_up=True,
            never_up="own_address",
            reserve=True,
            unit=7,
            drill="black_hole",
            unheard_ms=4_000,
        )
    ]
    assert read.groups == [
        journal.Group(
            name="tp:0",
            id=77,
            rank=1,
            ranks=2,
            call="barrier",
            call_began_ns=50,
            failed_calls=3,
            stalled_calls=4,
            stalled_ns=5,
            closed=False,
            latencies={"all_reduce": journal.Latency(6, 60_000, 600, (1, 5, *[0] * 22))},
            choice=Choice("two_shot", "loss", "loss", 9),
        )
    ]
    assert (read.label, read.heartbeat_ns, read.record_count, read.engine) == (
        "rank 0",
        7_000,
        1,
        99,
    )
    assert read.clock_ns(1_500) == 5_000_500
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
            text="reduce_scatter",
            sequence=1,
            entry=0,
        )
    ]


def test_a_state_change_has_a_text() -> None:
    (event,) = journal.parse(build(1, [record(1, kind=1)])).events
    assert event.text == "UP->DOWN carrier_loss"


def test_a_drill_marks_events_and_names_its_fault_and_its_end() -> None:
    def injected(sequence: int, at_peer: int, fault: int, mark: int) -> bytes:
        return struct.pack("<QqBBBBIIIQQQ", sequence, 10, 8, at_peer, fault, 0, 0, 3, 0, 0, 0, mark)

    records = [injected(1, 0, 4, 1), injected(2, 1, 0, 0), injected(3, 1, 255, 1)]
    events = journal.parse(build(3, records)).events
    assert [event.text for event in events] == ["slow", "heal at the peer", "unknown at the peer"]
    assert [event.in_drill for event in events] == [True, False, True]


def test_a_hedge_of_withheld_bytes_is_told_from_others() -> None:
    def hedge(sequence: int, withheld: int) -> bytes:
        return struct.pack("<QqBBBBIIIQQQ", sequence, 10, 4, withheld, 0, 0, 0, 3, 0, 0, 2, 0)

    events = journal.parse(build(2, [hedge(1, 0), hedge(2, 1)])).events
    assert [(event.kind, event.text) for event in events] == [("hedge", ""), ("hedge", "withheld")]


def test_a_verdict_and_a_speed_change_have_texts() -> None:
    verdict, speed = journal.parse(build(2, [record(1, kind=6), record(2, kind=7)])).events
    assert (verdict.kind, verdict.text) == ("verdict", "transient")
    assert (speed.kind, speed.text, speed.value) == ("speed", "slow", 1000)


def test_the_ring_is_read_from_its_oldest_record() -> None:
    ring = [record(5), record(6), record(3), record(4)]
    assert [event.time_ns for event in journal.parse(build(6, ring)).events] == [30, 40, 50, 60]


def test_a_record_that_is_being_overwritten_is_left_out() -> None:
    # record 6 is being written into the second entry
    ring = [record(5), record(2), record(3), record(4)]
    assert [event.time_ns for event in journal.parse(build(6, ring)).events] == [30, 40, 50]


def test_only_new_events_are_read() -> None:
    ring = [record(5), record(6), record(3), record(4)]
    assert [event.sequence for event in journal.parse(build(6, ring), after=4).events] == [5, 6]
    assert [event.sequence for event in journal.parse(build(6, ring), after=1).events] == [
        3,
        4,
        5,
        6,
    ]
    assert journal.parse(build(6, ring), after=6).events == []


def test_reading_a_file_equals_parsing_its_bytes(tmp_path: Path) -> None:
    data = build(6, [record(5), record(6), record(3), record(4)])
    (tmp_path / "one").write_bytes(data)
    for after in range(7):
        of_file = journal.read(tmp_path / "one", after=after)
        of_bytes = journal.parse(data, after=after).events
        # A writer may be overwriting the oldest entry, so a file is read without it.
        assert of_file.events == [event for event in of_bytes if event.sequence > 3]
    assert journal.read(tmp_path / "one", events=False) == journal.parse(data, events=False)


def test_an_event_without_a_rail_has_no_rail_name() -> None:
    (event,) = journal.parse(build(1, [record(1, rail=0xFFFFFFFF)])).events
    assert (event.rail, event.peer) == ("", "")


def test_an_unknown_event_kind_is_named_unknown() -> None:
    (event,) = journal.parse(build(1, [record(1, kind=99)])).events
    assert event.kind == "unknown-99"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "0 bytes are too few"),
        (b"R2JOURNL", "8 bytes are too few"),
        (build(1, [record(1)], magic=b"R3JOURNL"), f"not a journal of version {journal.VERSION}"),
        (build(1, [record(1)])[:-1], "truncated"),
        (build(1, [record(1)], rails=3), "truncated"),
    ],
)
def test_a_malformed_journal_is_an_error(data: bytes, words: str) -> None:
    with pytest.raises(journal.JournalError, match=words):
        journal.parse(data)
