"""A node of full size for tests: 8 workers with 8 rails to each of 8 peers, two NICs at fault."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from r2serve.observe.journal import Event, Journal, RailCounters
from r2serve.observe.watch import NumberedEvent, Watch, Worker

WORKERS = PEERS = RAILS = 8
DEAD, SLOW = 3, 5
HOST = "gpu-host-17"
BEGAN_CLOCK_NS = 1_795_324_260 * 1_000_000_000
"""CLOCK_REALTIME of the journals' time 0."""
LOST_NS = 7_000_000_000
SLOWED_NS = 9_000_000_000


def rail(number: int, peer: int) -> RailCounters:
    healthy = RailCounters(
        name=f"rail{number}@node0",
        kind="verbs",
        peer=f"rank {WORKERS + peer}",
        device=f"mlx5_bond_{number}",
        state="UP",
        cause="none",
        verdict="none",
        slow=number == SLOW,
        epoch=1,
        may_carry=True,
        graceful_close=False,
        peer_engine=WORKERS + peer,
        since_ns=1_000_000_000,
        tx_bytes=1 << 30,
        rx_bytes=1 << 30,
        data_tx_bytes=1 << 30,
        replayed_chunks=0,
        hedged_chunks=0,
        last_tx_ns=0,
        round_trip_ns=11_000,
        rate=0,
    )
    if number != DEAD:
        return healthy
    return replace(
        healthy,
        state="CONNECTING",
        cause="carrier_loss",
        verdict="local NIC",
        since_ns=LOST_NS + 5_000_000,
    )


def event(entry: int, of: RailCounters, sequence: int) -> Event:
    """Returns the event that tells the begin of a rail's fault."""
    lost = not of.slow
    return Event(
        time_ns=LOST_NS if lost else SLOWED_NS,
        kind="rail_state" if lost else "speed",
        rail=of.name,
        peer=of.peer,
        epoch=1,
        comm=0,
        call=0,
        value=int(lost),
        detail=0,
        text="UP->DOWN carrier_loss" if lost else "slow",
        sequence=sequence,
        entry=entry,
    )


def worker(rank: int) -> Worker:
    rails = [rail(number, peer) for peer in range(PEERS) for number in range(RAILS)]
    ill = [(entry, one) for entry, one in enumerate(rails) if one.slow or one.state != "UP"]
    made = Worker(f"{4000 + rank}-0", Path(), 0, host=HOST)
    made.take(
        Journal(
            process=4000 + rank,
            rails=rails,
            events=[event(entry, one, number) for number, (entry, one) in enumerate(ill, 1)],
            label=f"rank {rank}",
            opened_ns=1,
            opened_clock_ns=BEGAN_CLOCK_NS + 1,
            heartbeat_ns=time.monotonic_ns() + 3600 * 1_000_000_000,
        )
    )
    return made


class StillWatch(Watch):
    """A watch of workers that exist in the test only: no journal is read."""

    def look(self) -> list[NumberedEvent]:
        return []

    def add(self, told: list[NumberedEvent]) -> None:
        """Adds events, oldest first."""
        self.events.extend(replace(one, id=self.last_id + at) for at, one in enumerate(told, 1))
        self.last_id += len(told)


def full_node(folder: Path) -> StillWatch:
    """Returns a watch of the node: 512 ends of rails, 64 of them dead and 64 slow."""
    made = StillWatch(folder)
    made.host = HOST
    made.workers = {one.key: one for one in map(worker, range(WORKERS))}
    told = [made._told(one, event) for one in made.workers.values() for event in one.journal.events]
    made.add(sorted(told, key=lambda one: one.clock_ns))
    return made
