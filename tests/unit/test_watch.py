"""Running workers: the events of the watch, and the verdict of the probes."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pairs import Pair
from ports import free_port
from timely import timely

from r2serve import Communicator
from r2serve.config import Config
from r2serve.observe import health, watch
from r2serve.observe.journal import Group, Journal
from r2serve.observe.watch import NumberedEvent, Watch, Worker


def until(done: Callable[[], bool], what: str = "the expected state of the watch") -> None:
    timely(done, what, within_s=60, every_s=0.005)


def moves(told: list[NumberedEvent], rail: str) -> list[str]:
    """Returns the state changes of a rail, except SUSPECT, which may occur on a busy machine."""
    return [
        one.event.text.partition(" ")[0].replace("SUSPECT->DOWN", "UP->DOWN")
        for one in told
        if one.event.kind == "rail_state"
        and one.event.rail == rail
        and not one.event.text.startswith(("UP->SUSPECT", "SUSPECT->UP"))
    ]


def test_a_worker_is_on_the_host_that_its_journal_names() -> None:
    worker = Worker("1-a", Path(), 0, host="reader")
    worker.take(Journal(process=1))
    assert worker.host == "reader"
    worker.take(Journal(process=1, host="node-a"))
    assert worker.host == "node-a"


def test_events_are_reported_once_and_in_order(pair: Pair) -> None:
    seen = Watch(pair.folder)
    first = seen.look()
    assert moves(first, "rail1@node0") == ["CONNECTING->PROBATION", "PROBATION->UP"]
    pair.cut_and_heal(1)
    new = seen.look()
    assert moves(new, "rail1@node0") == [
        "UP->DOWN",
        "DOWN->FENCING",
        "FENCING->CONNECTING",
        "CONNECTING->PROBATION",
        "PROBATION->UP",
    ]
    assert not moves(new, "rail0@node0")
    later = seen.look()  # a host short of CPU may add events, but no loss of a rail
    for rail in ("rail0@node0", "rail1@node0"):
        assert not moves(later, rail)
    assert not [one for one in later if one.event.kind == "injected"]
    new += later
    assert list(seen.events) == first + new
    assert seen.after(first[-1].id) == new
    assert seen.after(0) == first + new
    assert seen.after(new[-1].id) == []
    ids = [told.id for told in seen.events]
    assert ids == sorted(set(ids))
    assert abs(new[-1].clock_ns - time.time_ns()) < 300e9


def test_events_have_the_same_ids_for_a_later_watch(tmp_path: Path) -> None:
    pair = Pair(tmp_path, both=True)
    early = Watch(tmp_path)
    stop = threading.Event()

    def strike() -> None:
        while not stop.is_set():
            pair.engine.inject(0, "heal")  # recorded, without any effect
            pair.ends[1].engine.inject(0, "heal")
            time.sleep(50e-6)  # more than 1 event a microsecond would shift all later ids

    striking = threading.Thread(target=strike)
    striking.start()
    until(lambda: bool(early.look() or True) and len(early.events) > 2000)
    stop.set()
    striking.join()
    late = Watch(tmp_path)
    until(lambda: not early.look() and not late.look(), "both watches know the last event")
    assert {told.label for told in early.events} == {"rank 0", "rank 1"}
    kept = min(len(early.events), len(late.events))
    same = zip(list(early.events)[-kept:], list(late.events)[-kept:], strict=True)
    differ = [(one.id, other.id) for one, other in same if one.id != other.id]
    # The kernel may suspend a writer between reading the clock and writing the event.
    timely(lambda: len(differ) < kept / 100, f"{len(differ)} of {kept} ids differ", within_s=0)
    pair.close()


def test_the_number_of_kept_events_is_limited(pair: Pair) -> None:
    seen = Watch(pair.folder, max_events=3)
    pair.cut_and_heal(1)
    new = seen.look()
    assert seen.known()[0].journal.record_count > 6
    assert seen.after(0) == new[-3:]
    assert seen.last_id == new[-1].id


def test_the_byte_rates_of_a_rail_are_measured(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_RATE_S", 0.1)
    seen = Watch(pair.folder)

    def carried() -> bool:  # probes are the only traffic
        seen.look()
        (worker,) = seen.live()
        return len(worker.rates) == 2 and all(rate.tx > 0 < rate.rx for rate in worker.rates)

    until(carried)


def test_a_folder_may_appear_later_and_a_journal_disappear(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    seen = Watch(folder)
    assert seen.look() == []
    folder.mkdir()
    pair = Pair(folder)
    until(lambda: bool(seen.look()))
    (worker,) = seen.live()
    assert (worker.label, worker.node, worker.status) == ("rank 0", "node0", "running")
    pair.close()
    until(lambda: bool(seen.look() or not seen.live()))
    assert worker.status == "closed"
    until(lambda: not seen.look())
    kept = list(seen.events)
    worker.path.unlink()
    until(lambda: bool(seen.look() or not seen.workers))
    assert list(seen.events) == kept


def test_an_invalid_journal_is_named_and_skipped(pair: Pair) -> None:
    (pair.folder / "r2ccl-1-1.journal").write_bytes(b"nothing")
    seen = Watch(pair.folder)
    assert seen.look()
    assert [worker.label for worker in seen.known()] == ["rank 0"]
    assert seen.unreadable == {"r2ccl-1-1.journal": "7 bytes are too few for a journal"}


# ---- health ----


def state_of(pair: Pair) -> health.Health:
    seen = Watch(pair.folder)
    seen.look()
    return health.examine(seen)


def test_without_a_worker_nothing_is_ready(tmp_path: Path) -> None:
    found = health.examine(Watch(tmp_path))
    assert (found.status, found.ready) == ("no-engine", False)
    assert str(tmp_path) in found.reasons[0]


def test_a_lost_rail_degrades_and_the_last_one_fails(pair: Pair) -> None:
    until(lambda: state_of(pair) == health.Health("ok"), "the pair is healthy")
    pair.engine.inject(1, "carrier_loss")
    until(lambda: state_of(pair).status == "degraded")
    found = state_of(pair)
    assert found.ready
    (reason,) = (one for one in found.reasons if "rail1@node0" in one)
    assert reason.endswith(": injected, drill: carrier_loss; 1 link of rank 0 to rank 1")
    pair.engine.inject(0, "carrier_loss")
    until(lambda: state_of(pair).status == "failing")
    found = state_of(pair)
    assert not found.ready
    assert found.reasons == ("rank 0: no rail to rank 1 is left",)
    pair.engine.inject(1, "heal")
    until(lambda: state_of(pair).status == "degraded")
    pair.engine.inject(0, "heal")
    until(lambda: state_of(pair).status == "ok")


def test_a_rail_never_up_is_told_from_a_lost_one(tmp_path: Path) -> None:
    pair = Pair(tmp_path, dead=1)
    try:
        pair.wait_for_state(0, "UP")

        def reason() -> str:
            return next((one for one in state_of(pair).reasons if "rail1@node0" in one), "")

        # The end that connects knows that the port refuses; the other end only waits.
        told = re.compile(
            r"rail1@node0 .*has never been up: (refused|no connection); "
            "1 link of rank 0 to rank 1"
        )
        until(lambda: told.fullmatch(reason()), "the reason why rail 1 has never been up")
        assert state_of(pair).ready
        pair.engine.inject(0, "carrier_loss")
        until(lambda: state_of(pair).status == "failing", "no rail is left")
    finally:
        pair.close()


def test_a_process_that_is_silent_fails(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SILENT_S", -1.0)
    found = state_of(pair)
    assert found.status == "failing"
    assert found.reasons[0].startswith("rank 0: the process has had no heartbeat for ")


def unheard(pair: Pair, unheard_ms: int) -> Watch:
    """Returns a watch of the pair whose rank 0 has heard nothing of rank 1 for a time.

    Its rails are UP: a starved machine may suspect one for a moment.
    """
    seen = Watch(pair.folder)
    seen.look()
    (worker,) = seen.live()
    silent = [replace(rail, state="UP", unheard_ms=unheard_ms) for rail in worker.journal.rails]
    worker.journal = replace(worker.journal, rails=silent, groups=[])
    return seen


def test_a_peer_silent_on_all_rails_fails_from_the_limit_on(pair: Pair) -> None:
    until(lambda: state_of(pair).status == "ok")
    assert health.examine(unheard(pair, 4_900)).status == "ok"
    found = health.examine(unheard(pair, 5_100))
    assert found.status == "failing"
    assert found.reasons == ("rank 0: rank 1 has sent nothing on any rail for 5 s",)
    assert health.examine(unheard(pair, 5_100), stuck_s=6.0).status == "ok"
    assert health.examine(unheard(pair, 400), stuck_s=0.3).status == "failing"


@pytest.mark.case("25", "a rank that waits was no longer ready, although its peer computed")
@pytest.mark.parametrize("call", ["recv", "send", "all_reduce"])
def test_a_long_call_of_a_pipeline_stage_needs_a_silent_peer_to_fail(pair: Pair, call: str) -> None:
    """A prefill of 20 s, a graph capture or a slow step of the other stage is no fault."""
    until(lambda: state_of(pair).status == "ok")
    began_ns = time.monotonic_ns() - 20_000_000_000
    stage = Group("pp:0", 1, 0, 2, call, began_ns, 0, 0, 0, closed=False, latencies={})

    def found(unheard_ms: int) -> health.Health:
        seen = unheard(pair, unheard_ms)
        (worker,) = seen.live()
        worker.journal = replace(worker.journal, groups=[stage])
        return health.examine(seen)

    assert found(400).status == "ok"
    (reason,) = found(5_100).reasons
    silence = "rank 0: rank 1 has sent nothing on any rail for 5 s"
    assert re.fullmatch(rf"{silence}; {call} of pp:0 has run for \d+ s", reason)


@pytest.mark.case("25", "a collective of 5 s was no longer ready, although the peer computed")
def test_a_collective_that_waits_for_a_living_peer_is_ready(tmp_path: Path) -> None:
    port = free_port()
    go = threading.Event()

    def work(rank: int) -> None:
        config = Config(rails="127.0.0.1", node="per-rank", journal_dir=str(tmp_path))
        with Communicator.standalone(
            "127.0.0.1", port, rank, 2, name="tp:0", config=config, share_engine=False
        ) as group:
            group.barrier()
            if rank == 1:
                go.wait()
            group.all_reduce(torch.ones(10))
            done.wait()

    done = threading.Event()
    ranks = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in ranks:
        thread.start()
    seen = Watch(tmp_path)

    def longest_call_s() -> float:
        seen.look()
        began = [
            group.call_began_ns
            for worker in seen.live()
            for group in worker.journal.groups
            if group.call
        ]
        return (time.monotonic_ns() - min(began)) / 1e9 if began else 0.0

    try:
        until(lambda: longest_call_s() > 2.0, "rank 0 waits for rank 1")
        # A machine short of CPU may delay the answers of the peer for a moment.
        until(
            lambda: longest_call_s() > 2.0 and health.examine(seen, stuck_s=1.0).ready,
            "the waiting rank is ready",
        )
        go.set()
        until(lambda: longest_call_s() == 0.0, "the collective has ended")
    finally:
        go.set()
        done.set()
        for thread in ranks:
            thread.join()
