"""Rails that fail repeatedly, and ports with a new address or MTU."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from rails import rails

if TYPE_CHECKING:
    from ranks import Job

SMALL, LARGE = 4 * 1024, 256 * 1024  # floats: 16 KiB, 1 message; 1 MiB, striped
FLAPS = 4
HOLE_S = 6.0
MOST_EPOCHS = 6
BOUND_S = 40.0
RETRIES_MS = 400.0
"""Time until a queue pair gives up by itself, at the default timeout and retry count."""


def stalls(job: Job, rank: int, since: int) -> list[dict[str, Any]]:
    events = job.ranks[rank].ask("events")
    return [e for e in events if e["kind"] == "stall" and e["time_ns"] >= since]


def pauses_of(events: list[dict[str, Any]], rail: str, since: int) -> list[float]:
    """Returns the time from each DOWN of the rail to its next UP, in s."""
    pauses, down = [], None
    for event in events:
        if event["time_ns"] < since or not event["rail"].startswith(f"{rail}@"):
            continue
        if "->DOWN" in event["text"] and down is None:
            down = event["time_ns"]
        elif "->UP" in event["text"] and down is not None:
            pauses.append((event["time_ns"] - down) / 1e9)
            down = None
    return pauses


def is_up(job: Job) -> bool:
    return {rails[0]["state"] for rails in job.ask("rails")} == {"UP"}


def await_carries(job: Job, rail: int) -> None:
    """Waits until the rail is UP and carries data from both ends."""
    job.await_up()
    before = [job.carried(rank)[f"rail{rail}"] for rank in (0, 1)]
    job.eventually(
        f"rail{rail} carries data",
        lambda: all(job.carried(rank)[f"rail{rail}"] > before[rank] for rank in (0, 1)),
    )


@pytest.mark.usefixtures("alone")
def test_flaps_of_a_rail_and_a_hole_for_large_frames(
    new_job: type[Job], show: Callable[[str], None]
) -> None:
    # A flap takes seconds in the guest. The back-off takes seconds, too, so that its growth shows.
    job = new_job(
        rails_of=lambda rank: f"n{rank}r0,n{rank}r1,n{rank}r2",
        rejoin_backoff_min_ms=500,
        rejoin_backoff_max_ms=8000,
        flap_half_life_s=600.0,
        handshake_timeout_ms=1500,
    )
    since = time.monotonic_ns()
    with job.over_verbs(), job.stream(SMALL) as stream:
        stream.more(5)
        victim = stream.busiest()
        for flap in range(FLAPS):
            rails("down", f"n{flap % 2}r{victim}")
            stream.more(3)
            rails("up", f"n{flap % 2}r{victim}")
            stream.more(3)
            job.await_up()  # the next flap must find the rail in use, or ready for use
    events = job.ranks[0].ask("events")
    pauses = pauses_of(events, f"rail{victim}", since)
    costs = {rank: stalls(job, rank, since) for rank in (0, 1)}
    show(
        f"{FLAPS} flaps of the rail in use, 16 KiB: outages of "
        f"{', '.join(f'{pause:.1f}' for pause in pauses)} s; stalls in the journals "
        + "; ".join(
            ", ".join(f"{stall['value'] / 1e6:.0f}" for stall in of_rank) + " ms"
            for of_rank in costs.values()
        )
    )
    downs = job.moves(since)
    assert {rail for _, rail, _ in downs} == {f"rail{victim}"}, downs
    assert max(pauses[1:]) > 1.25 * pauses[0], "not damped"
    for rank, hit in costs.items():
        calls = [stall["call"] for stall in hit]
        assert len(calls) == len(set(calls))
        # The two ends may notice a fault in two successive calls.
        faults = [call for call in calls if call - 1 not in calls]
        assert len(faults) <= len([move for move in downs if move[0] == rank])
        # Other work of the host may delay a call; without the event, every stall would be longer.
        assert min((stall["value"] for stall in hit), default=0) < RETRIES_MS * 1e6

    since = time.monotonic_ns()
    with job.over_verbs(), job.stream(LARGE) as stream:
        stream.more(10)
        before = job.rail(0)["epoch"]
        rails("narrow", "n0r0")
        job.await_left(0)
        time.sleep(HOLE_S)
        stream.more(5)
        epochs = job.rail(0)["epoch"] - before
        through = [move for move in job.moves(since, to="UP") if move[1] == "rail0"]
        rails("widen", "n0r0")
        job.await_up()
    show(f"only small frames pass for {HOLE_S:g} s: {epochs} epochs meanwhile, none of them UP")
    assert through == []
    assert epochs <= MOST_EPOCHS
    job.stop()


@pytest.mark.usefixtures("alone")
def test_flaps_of_the_only_rail(new_job: type[Job], show: Callable[[str], None]) -> None:
    job = new_job(rails_of=lambda rank: f"n{rank}r0", rejoin_backoff_max_ms=5000)
    waited = []
    with job.over_verbs(), job.stream(SMALL) as stream:
        stream.more(5)
        for flap in range(4):
            rails("down", f"n{flap % 2}r0")
            job.eventually("one end has noticed", lambda: not is_up(job))
            rails("up", f"n{flap % 2}r0")
            healed = time.monotonic()
            stream.more(2)
            waited.append(time.monotonic() - healed)
    job.stop()
    show(f"flaps of the only rail: resumes after {', '.join(f'{s:.1f}' for s in waited)} s")
    assert max(waited) < BOUND_S


def test_a_rail_rejoins_with_a_new_address_or_mtu(job: Job, show: Callable[[str], None]) -> None:
    """The port changes under traffic; the rail rejoins with the new address or MTU."""
    with job.stream(LARGE) as stream:
        stream.more(5)
        rail = stream.busiest()
        epochs = [job.rail(rail)["epoch"]]
        for node, host in ((0, 101), (1, 102), (0, 1), (1, 2)):
            rails("move", f"n{node}r{rail}", str(host))
            address = f"10.{rail}.0.{host}"
            job.eventually(f"its address is {address}", partial(has_address, job, rail, address))
            await_carries(job, rail)
            epochs.append(job.rail(rail)["epoch"])
        for node, mtu in ((0, 2200), (1, 1200)):
            rail = stream.busiest()
            before = job.rail(rail)["epoch"]
            rails("mtu", f"n{node}r{rail}", str(mtu))
            job.eventually("the rail rejoins", partial(is_newer, job, rail, before))
            await_carries(job, rail)
            rails("mtu", f"n{node}r{rail}", "4200")
            await_carries(job, rail)
    assert epochs == sorted(set(epochs)), "a change caused no rejoin"
    show(
        f"4 changes of an address, {epochs[-1] - epochs[0]} new epochs, and 2 of an MTU: "
        f"longest call {stream.longest():.0f} ms, median {stream.median:.0f} ms"
    )


def has_address(job: Job, rail: int, address: str) -> bool:
    """Returns whether an end reports the address as local, and the other end as remote."""
    ends = [job.rail(rail, rank) for rank in (0, 1)]
    said = [end[side].partition(":")[0] for end in ends for side in ("local", "remote")]
    return said.count(address) == 2


def is_newer(job: Job, rail: int, epoch: int) -> bool:
    return all(job.rail(rail, rank)["epoch"] > epoch for rank in (0, 1))
