"""The demo's faults: choice of the rail, journals read afterwards, and giving up."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from r2serve.demo import faults
from r2serve.demo.faults import EngineInjector, FaultError, Striker, cost_of
from r2serve.lab import player as players
from r2serve.lab.injector import Injector
from r2serve.lab.serving.journals import Journals

MS = 1_000_000


def event(kind: str, value: int, at_ms: float = 0.0, rail: str = "") -> Any:
    return SimpleNamespace(kind=kind, value=value, time_ns=int(at_ms * MS), rail=rail)


class FakeEngine:
    """Journals and injector of an engine whose traffic moves to the other rail at a strike."""

    rails = 2

    def __init__(self, in_use: int | None, misses: int = 0, comes_back: bool = True) -> None:
        self.in_use = in_use
        self.misses = misses
        self.comes_back = comes_back
        self.pauses = 0
        self.log: list[tuple[str, str, int, int | None]] = []
        self._sent: Counter[int] = Counter({0: 0, 1: 0})
        self._events: list[Any] = []

    def sent_bytes(self) -> Counter[int]:
        if self.in_use is not None and not self._paused():
            self._sent[self.in_use] += 8192
        return Counter(self._sent)

    def _paused(self) -> bool:
        self.pauses -= bool(self.log and self.pauses)
        return bool(self.log and self.pauses)

    def down(self) -> set[int] | None:
        rail = self.log[-1][-1] if self.log and not self.comes_back else None
        return set() if rail is None else {rail}

    def events(self, begin_ns: int, end_ns: int) -> list[Any]:
        return self._events

    def make(self, kind: str, node: int, rail: int | None) -> None:
        self.log.append(("strike", kind, node, rail))
        if rail is None:
            return
        assert self.in_use is not None
        self.in_use = 1 - self.in_use
        if self.misses:
            self.misses -= 1
            self._events = []
        else:
            self._events = [event("replay", 1, 1, f"rail{rail}@node1"), event("stall", 4 * MS, 3)]

    def undo(self, kind: str, node: int, rail: int | None) -> None:
        self.log.append(("heal", kind, node, rail))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NOTICE_S", "WATCH_S"):
        monkeypatch.setattr(faults, name, 0.0)
    monkeypatch.setattr(faults, "POLL_S", 0.001)
    monkeypatch.setattr(faults, "AIM_TIMEOUT_S", 0.1)
    monkeypatch.setattr(players, "REJOIN_TIMEOUT_S", 0.1)
    monkeypatch.setattr(faults, "PREFER_S", 0.05)


def striker(engine: FakeEngine, decoding: Callable[[], bool] = lambda: True) -> Striker:
    as_journals: Any = engine
    return Striker(as_journals, engine, 0.0, decoding, watch=lambda line: None)


def test_the_rail_in_use_is_struck_and_healed() -> None:
    engine = FakeEngine(in_use=1)
    rail, report = striker(engine).fault("carrier_loss", node=0)
    assert rail == 1
    assert engine.log == [("strike", "carrier_loss", 0, 1), ("heal", "carrier_loss", 0, 1)]
    assert (report.rail, report.rail_after) == ("rail1@node0", "rail0@node0")
    assert report.bytes_before == 8192
    assert report.stall_ms_max == 4.0
    assert report.problems() == []


def test_the_management_nic_is_taken_away_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "AWAY_S", 0.1)
    engine = FakeEngine(in_use=1)
    played = striker(engine).management(node=1)
    assert engine.log == [("strike", "carrier_loss", 1, None), ("heal", "carrier_loss", 1, None)]
    assert played.rails == ()
    assert played.healed_ns is not None
    assert played.healed_ns - played.struck_ns >= 0.1e9
    with pytest.raises(FaultError, match="carrier_loss fault on mgmt@node1 was over"):
        striker(engine, decoding=lambda: False).management(node=1)
    assert [word for word, *_ in engine.log] == ["strike", "heal"] * 2


def test_a_strike_without_a_stall_is_repeated_and_counted() -> None:
    engine = FakeEngine(in_use=0, misses=2)
    _, report = striker(engine).fault("carrier_loss", node=0)
    assert [word for word, *_ in engine.log] == ["strike", "heal"] * 3
    assert report.missed_strikes == 2
    assert report.stalls == 1


def test_strikes_without_any_stall_are_a_problem() -> None:
    engine = FakeEngine(in_use=0, misses=1000)
    _, report = striker(engine).fault("carrier_loss", node=0)
    assert len(engine.log) == 2 * faults.MAX_STRIKES
    assert any("stalled" in problem for problem in report.problems())


def test_the_rail_to_avoid_is_struck_only_if_no_other_comes_into_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(faults, "AIM_TIMEOUT_S", 60.0)  # a pause may be longer than PREFER_S
    engine = FakeEngine(in_use=0)
    began = time.monotonic()
    rail, _ = striker(engine).fault("black_hole", node=1, avoid=0)
    assert rail == 0
    assert time.monotonic() - began >= faults.PREFER_S
    engine = FakeEngine(in_use=1)
    rail, _ = striker(engine).fault("black_hole", node=1, avoid=0)
    assert rail == 1


def test_idle_rails_are_not_struck() -> None:
    with pytest.raises(FaultError, match="no rail had traffic"):
        striker(FakeEngine(in_use=None)).fault("carrier_loss", node=0)


def test_no_strike_after_decoding_has_ended() -> None:
    engine = FakeEngine(in_use=0)
    with pytest.raises(FaultError, match="decoding ended"):
        striker(engine, decoding=lambda: False).fault("carrier_loss", node=0)
    assert engine.log == []


def test_a_rail_that_does_not_come_back_is_a_problem() -> None:
    _, report = striker(FakeEngine(in_use=0, comes_back=False)).fault("carrier_loss", node=0)
    assert report.rejoin_ms is None
    assert any("did not rejoin" in problem for problem in report.problems())


def test_a_fault_is_healed_when_watching_it_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = FakeEngine(in_use=0)

    def interrupted(self: object, since_s: float) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(faults.RailInUse, "seen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        striker(engine).fault("carrier_loss", node=0)
    assert [word for word, *_ in engine.log] == ["strike", "heal"]


def test_a_fault_stays_while_decoding_pauses() -> None:
    """The fault must last until traffic shows the rail in use."""
    engine = FakeEngine(in_use=1)
    engine.pauses = 20
    _, report = striker(engine).fault("carrier_loss", node=0)
    assert engine.pauses == 0
    assert report.rail_after == "rail0@node0"


def test_a_fault_is_healed_even_without_further_traffic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(faults, "LONGEST_S", 0.1)
    engine = FakeEngine(in_use=1)
    engine.pauses = 10**6
    _, report = striker(engine).fault("carrier_loss", node=0)
    assert report.rail_after == ""
    assert engine.log[-1][0] == "heal"
    assert any("did not move" in problem for problem in report.problems())


def test_the_last_attempt_of_each_fault_is_kept_with_its_times() -> None:
    told: list[str] = []
    engine = FakeEngine(in_use=0, misses=1)
    as_journals: Any = engine
    aim = Striker(as_journals, engine, 0.0, lambda: True, told.append)
    aim.fault("carrier_loss", node=0)
    assert told == [
        "carrier_loss on rail0@node0",
        "carrier_loss on rail0@node0: stalled 0.0 ms; healed",
        "carrier_loss on rail0@node0 stalled no collective; repeating the fault",
        "carrier_loss on rail1@node0",
        "carrier_loss on rail1@node0: stalled 4.0 ms; healed",
    ]
    (played,) = aim.played
    assert played.rails == (1,)
    assert played.healed_ns is not None
    assert played.back_ns is not None
    assert played.struck_ns < played.healed_ns <= played.back_ns


def test_costs_are_added_up() -> None:
    events = [
        event("stall", 3 * MS, 9),  # before any replay
        event("hedge", 3, 10, "rail1@node0"),
        event("replay", 1, 12, "rail1@node1"),
        event("replay", 50, 12, "rail0@node1"),  # on another rail
        event("rail_state", 0, 12, "rail1@node1"),
        event("replay", 7, 12, "control@node1"),
        event("stall", 25 * MS // 10, 13),
        event("stall", 20 * MS, 70),
        event("stall", 900 * MS, 990),  # began long after the replay
    ]
    assert cost_of(events, rail=1) == faults.Cost(
        stalls=2, stall_ms_max=20.0, replayed_chunks=4, hedged_chunks=3
    )


def test_a_wait_without_replay_is_no_stall_of_the_rail() -> None:
    assert cost_of([event("stall", 7 * MS, 5)], rail=0) == faults.Cost(0, 0.0, 0, 0)


def test_counters_are_summed_over_workers_without_shared_memory_and_relays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counters(name: str, kind: str, sent: int, state: str) -> Any:
        return SimpleNamespace(name=name, kind=kind, data_tx_bytes=sent, state=state)

    books: dict[str, Any] = {
        "r2ccl-1.journal": [counters("rail0@node0", "tcp", 5, "UP")],
        "r2ccl-2.journal": [
            counters("rail0@node1", "tcp", 7, "UP"),
            counters("rail1@node1", "tcp", 1, "DOWN"),
            counters("rail0@node1", "shm", 1000, "UP"),
        ],
        "r2ccl-3.journal": [
            counters("rail0@node1", "tcp", 500, "DOWN"),
            counters("rail1@node1", "tcp", 500, "UP"),
        ],
    }
    labels = {"r2ccl-1.journal": "rank 0", "r2ccl-2.journal": "rank 1"}
    for name in books:
        (tmp_path / name).touch()
    (tmp_path / "other.txt").touch()
    monkeypatch.setattr(
        faults.journal,
        "read",
        lambda path, events: SimpleNamespace(
            rails=books[path.name],
            events=[event("replay", 1, 1, path.name)] if events else [],
            label=labels.get(path.name, "relay of node 1"),
        ),
    )
    journals = Journals([tmp_path])
    assert journals.sent_bytes() == Counter({0: 12, 1: 1})
    assert not journals.all_up()
    assert journals.down() == {0, 1}
    assert [one.rail for one in journals.events(0, 2 * MS)] == list(labels)
    assert Journals([]).down() is None


def test_faults_inside_the_engine_are_lines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "faults"
    injector: Injector = EngineInjector(path, 2)
    injector.make("carrier_loss", 0, 0)
    injector.undo("carrier_loss", 0, 0)
    injector.make("black_hole", 1, 1)
    with pytest.raises(ValueError, match="no management NIC"):
        injector.make("carrier_loss", 0, None)
    assert path.read_text(encoding="ascii") == "0 carrier_loss\n0 heal\n1 black_hole\n"
