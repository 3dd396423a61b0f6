"""Health of a node of full size: a sentence per fault, not per end of a rail."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from full_node import DEAD, SLOW, WORKERS, full_node

from r2serve.observe import health
from r2serve.observe.journal import RailCounters
from r2serve.observe.sidecar.health_log import GONE_S, REMIND_S, SETTLE_S, HealthLog
from r2serve.observe.sidecar.schema import HealthView
from r2serve.observe.watch import Watch

DEAD_NIC = (
    "rail3@node0 (mlx5_bond_3) on gpu-host-17 is DOWN (reconnecting) since 2026-11-22 05:11:07"
    "+00:00: carrier_loss, fault at the local NIC; 64 links of 8 workers to 8 peers"
)
SLOW_NIC = (
    "rail5@node0 (mlx5_bond_5) on gpu-host-17 is slow since 2026-11-22 05:11:09+00:00; "
    "64 links of 8 workers to 8 peers"
)


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def change(watch: Watch, new: Callable[[int, RailCounters], RailCounters]) -> None:
    """Replaces every end of a rail; `new` gets the number of its worker, too."""
    for number, worker in enumerate(watch.workers.values()):
        rails = [new(number, rail) for rail in worker.journal.rails]
        worker.journal = replace(worker.journal, rails=rails)


def is_of(rail: RailCounters, number: int) -> bool:
    return rail.name == f"rail{number}@node0"


def healed(_: int, rail: RailCounters) -> RailCounters:
    return replace(rail, state="UP", slow=False, cause="none", verdict="none")


def test_a_dead_and_a_slow_port_of_a_full_node_are_two_sentences(tmp_path: Path) -> None:
    found = health.examine(full_node(tmp_path))
    assert found == health.Health("degraded", (DEAD_NIC, SLOW_NIC))
    dead, slow = found.details
    assert len(dead.ends) == len(slow.ends) == 64
    assert dead.ends[0] == (
        "rank 0: rail3@node0 to rank 8 is DOWN (reconnecting) since 2026-11-22 05:11:07+00:00: "
        "carrier_loss, fault at the local NIC"
    )
    assert slow.ends[-1] == (
        "rank 7: rail5@node0 to rank 15 is slow since 2026-11-22 05:11:09+00:00"
    )


def test_only_health_folds_the_ends_out(tmp_path: Path) -> None:
    found = health.examine(full_node(tmp_path))
    assert HealthView.of(found).reasons == [DEAD_NIC, SLOW_NIC]
    assert HealthView.of(found).details == []
    assert [len(one.ends) for one in HealthView.of(found, details=True).details] == [64, 64]


def test_a_rail_that_came_back_has_no_loss_of_before(tmp_path: Path) -> None:
    """The loss of an idle reserve interrupts no traffic, so its event has no value."""
    worker = next(iter(full_node(tmp_path).workers.values()))
    journal = worker.journal
    (first, *_) = journal.events
    entry, lost_ns = first.entry, first.time_ns
    assert worker.since_ns(entry) == lost_ns
    back = replace(first, time_ns=lost_ns + 1, value=0, text="PROBATION->UP")
    again = replace(first, time_ns=lost_ns + 2, value=0, text="UP->DOWN carrier_loss")
    rails = list(journal.rails)
    rails[entry] = replace(rails[entry], since_ns=lost_ns + 3)
    worker.take(replace(journal, rails=rails, events=[back, again]))
    assert worker.since_ns(entry) == lost_ns + 3


def test_a_fault_of_some_links_names_their_number_and_peer(tmp_path: Path) -> None:
    watch = full_node(tmp_path)
    change(
        watch,
        lambda _, rail: (
            replace(healed(0, rail), state="DOWN", cause="peer_notice", verdict="remote NIC")
            if is_of(rail, DEAD) and rail.peer == "rank 9"
            else healed(0, rail)
        ),
    )
    (reason,) = health.examine(watch).reasons
    assert reason.startswith("rail3@node0 (mlx5_bond_3) on gpu-host-17 is DOWN since ")
    assert reason.endswith(
        ": peer_notice, fault at the remote NIC; 8 of 64 links of 8 workers to rank 9"
    )


def test_a_port_in_several_states_is_one_sentence_and_a_drill_another(tmp_path: Path) -> None:
    watch = full_node(tmp_path)

    def mixed(worker: int, rail: RailCounters) -> RailCounters:
        if not is_of(rail, DEAD):
            return healed(worker, rail)
        if worker < 2:
            return replace(rail, drill="carrier_loss")
        return replace(rail, state="SUSPECT") if worker == 7 else rail

    change(watch, mixed)
    found = health.examine(watch)
    drilled, real = found.reasons
    assert drilled.endswith(
        "carrier_loss, fault at the local NIC, drill: carrier_loss; "
        "16 of 64 links of rank 0, rank 1 to 8 peers"
    )
    assert real.endswith("; 40 of 64 links of 5 workers to 8 peers, 8 more SUSPECT")
    assert found.details[0].about == found.details[1].about + ", drill: carrier_loss"


def test_a_rail_that_was_never_up_has_the_most_frequent_reason_first(tmp_path: Path) -> None:
    watch = full_node(tmp_path)

    def unborn(worker: int, rail: RailCounters) -> RailCounters:
        if not is_of(rail, DEAD):
            return healed(worker, rail)
        why = "refused" if worker == 0 else "no_connection"
        return replace(rail, been_up=False, never_up=why, cause="none", verdict="none")

    change(watch, unborn)
    assert health.examine(watch).reasons == (
        "rail3@node0 (mlx5_bond_3) on gpu-host-17 has never been up: no connection, refused; "
        "64 links of 8 workers to 8 peers",
    )


def test_no_rail_to_any_peer_is_one_sentence(tmp_path: Path) -> None:
    watch = full_node(tmp_path)
    change(watch, lambda _, rail: replace(rail, state="DOWN"))
    found = health.examine(watch)
    assert found == health.Health("failing", ("no rail to 8 peers is left; 64 links of 8 workers",))
    assert found.details[0].ends[63] == "rank 7: no rail to rank 15 is left"
    change(watch, lambda _, rail: replace(rail, state="UP", unheard_ms=7_000))
    assert health.examine(watch).reasons == (
        "8 peers: nothing sent on any rail for up to 7 s; 64 links of 8 workers",
    )
    change(watch, lambda _, rail: replace(rail, graceful_close=rail.peer == "rank 9", unheard_ms=0))
    assert health.examine(watch).reasons == ("rank 9: links closed; 8 links of 8 workers",)


def test_a_shortage_of_cpu_is_one_note_of_the_host(tmp_path: Path) -> None:
    watch = full_node(tmp_path)
    for number, worker in enumerate(watch.workers.values()):
        worker.short_of_cpu = number / 10
    found = health.examine(watch)
    assert found.notes == (
        "this host is short of CPU: 7 workers did not run for up to 70% of the last 10 s",
    )
    assert len(found.noted[0].ends) == WORKERS - 1


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == "r2serve.sidecar"]


def test_the_log_tells_a_fault_once_an_hour_and_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "r2serve.sidecar")
    watch, log = full_node(tmp_path), HealthLog()
    log.take(health.examine(watch), 100.0)
    assert lines(caplog) == []
    begun_s = 100.0 + SETTLE_S
    log.take(health.examine(watch), begun_s)
    assert lines(caplog) == [DEAD_NIC, SLOW_NIC]
    log.take(health.examine(watch), begun_s + REMIND_S - 1)
    assert len(lines(caplog)) == 2
    log.take(health.examine(watch), begun_s + REMIND_S)
    assert lines(caplog)[2:] == [f"still: {DEAD_NIC}", f"still: {SLOW_NIC}"]
    last_s = begun_s + REMIND_S
    change(watch, lambda _, rail: rail if is_of(rail, SLOW) else healed(0, rail))
    log.take(health.examine(watch), last_s + GONE_S - 1)
    assert len(lines(caplog)) == 4
    log.take(health.examine(watch), last_s + GONE_S)
    assert lines(caplog)[4:] == ["over: rail3@node0 (mlx5_bond_3) on gpu-host-17"]


def test_the_log_ends_no_fault_of_a_port_while_the_node_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "r2serve.sidecar")
    ill, failing, well = full_node(tmp_path), full_node(tmp_path), full_node(tmp_path)
    change(failing, lambda _, rail: replace(rail, state="DOWN"))
    change(well, healed)
    log = HealthLog()
    for now_s in (100.0, 100.0 + SETTLE_S):
        log.take(health.examine(ill), now_s)
    for now_s in (200.0, 200.0 + SETTLE_S, 200.0 + 2 * GONE_S):
        log.take(health.examine(failing), now_s)
    assert lines(caplog)[2:] == ["no rail to 8 peers is left; 64 links of 8 workers"]
    last_s = 200.0 + 2 * GONE_S
    log.take(health.examine(well), last_s + GONE_S - 1)
    assert len([one for one in lines(caplog) if one.startswith("over: rail")]) == 0
    log.take(health.examine(well), last_s + GONE_S)
    assert len([one for one in lines(caplog) if one.startswith("over: rail")]) == 2


def test_the_log_tells_each_peer_that_is_lost_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "r2serve.sidecar")
    watch, log = full_node(tmp_path), HealthLog()

    def lose(*peers: str) -> health.Health:
        change(watch, lambda _, rail: replace(rail, state="DOWN" if rail.peer in peers else "UP"))
        return health.examine(watch)

    for at, peers in enumerate((["rank 8"],) * 2 + (["rank 8", "rank 9"], ["rank 9"]) * 3):
        log.take(lose(*peers), 100.0 + at * SETTLE_S)
    assert lines(caplog) == [
        "no rail to rank 8 is left; 8 links of 8 workers",
        "more: no rail to rank 8, rank 9 is left; 16 links of 8 workers",
    ]
    change(watch, healed)
    log.take(health.examine(watch), 200.0)
    assert lines(caplog)[2:] == ["over: peers without a rail"]


def test_a_flapping_port_has_one_line_and_an_engine_that_ends_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "r2serve.sidecar")
    ill, well, log = full_node(tmp_path), full_node(tmp_path), HealthLog()
    change(well, healed)
    for flap in range(100):
        log.take(health.examine(ill if flap % 2 else well), 100.0 + flap)
    assert len(lines(caplog)) == 2
    log.take(health.examine(Watch(tmp_path)), 300.0)
    log.take(health.examine(well), 300.0 + 2 * GONE_S)
    assert len(lines(caplog)) == 2
