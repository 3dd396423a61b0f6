"""Sidecars beside a job over real rails: reports of a carrier loss, and kills of either process."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from real_rails import REJOIN_S, Stream
from sidecars import Sidecar
from timely import timely

VISIBLE_S = 10.0  # about 0.2 s on a machine with a core for each process


@pytest.fixture
def sidecars(tmp_path: Path, free_ports: Any) -> Iterator[list[Sidecar]]:
    """Starts a sidecar for each of two nodes; the folders have the journals of the two ranks."""
    made = []
    for node, port in enumerate(free_ports(2)):
        folder = tmp_path / f"node{node}"
        folder.mkdir()
        made.append(Sidecar(folder, port))
    yield made
    for sidecar in made:
        sidecar.kill()


def stream_of(jobs: Any, make_lab: Any, sidecars: list[Sidecar]) -> Stream:
    return Stream(
        jobs, make_lab(2), per_rank=lambda rank: {"journal_dir": str(sidecars[rank].folder)}
    )


def listen(sidecar: Sidecar, heard: list[tuple[float, dict[str, Any]]]) -> None:
    """Records events with their arrival times, until the sidecar ends."""
    url = f"http://127.0.0.1:{sidecar.port}/v1/events/stream?after=0"
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=300) as lines:
        for line in lines:
            if line.startswith(b"data: "):
                heard.append((time.time(), json.loads(line.removeprefix(b"data: "))))


def downs_of(heard: list[tuple[float, dict[str, Any]]]) -> list[tuple[float, dict[str, Any]]]:
    """Returns the delay in s and the event of each loss of a rail that was in use."""
    return [
        (at - datetime.fromisoformat(event["time"]).timestamp(), event)
        for at, event in list(heard)
        if "->DOWN" in event["text"] and "PROBATION->" not in event["text"]
    ]


@pytest.mark.timeout(300)
def test_a_carrier_loss_is_reported_and_counted_at_once(
    jobs, make_lab, sidecars, eventually, show
) -> None:
    stream = stream_of(jobs, make_lab, sidecars)
    for sidecar in sidecars:
        eventually("ready", lambda s=sidecar: s.get("/readyz")[0] == 200)
    heard: list[list[tuple[float, dict[str, Any]]]] = [[], []]
    for sidecar, into in zip(sidecars, heard, strict=True):
        threading.Thread(target=listen, args=(sidecar, into), daemon=True).start()
    eventually("events of the start", lambda: all(heard))
    rail = stream.busiest()
    stream.lab.cut(1, rail)
    eventually(f"rail {rail} DOWN", lambda: stream.is_out(rail))
    for node, sidecar in enumerate(sidecars):
        name = f"rail{rail}@node{node}"
        eventually(
            "counted", lambda s=sidecar, n=name: s.metric("r2serve_failover_total", rail=n) == 1
        )
        assert sidecar.metric("r2serve_rail_state", rail=name) == 1  # exactly a single state
        assert sidecar.metric("r2serve_rail_state", rail=name, state="UP") == 0
        assert sidecar.metric("r2serve_rail_up", rail=name) == 0
        other = f"rail{1 - rail}@node{node}"
        eventually(  # a starved machine may suspect the other rail
            "other rail UP", lambda s=sidecar, n=other: s.metric("r2serve_rail_up", rail=n) == 1
        )
        # A starved machine may keep a worker from its heartbeat for a moment.
        eventually("ready", lambda s=sidecar: s.get("/readyz")[0] == 200)
        eventually("degraded", lambda s=sidecar: s.ask("/readyz")["status"] == "degraded")
        (lost,) = [each for each in sidecar.ask("/v1/rails")["rails"] if each["name"] == name]
        assert lost["device"] == f"rail{rail}"
        assert (lost["state"], lost["peer"]) != ("UP", f"rank {node}")
        eventually("reported", lambda n=node: downs_of(heard[n]))
        downs = downs_of(heard[node])
        assert {event["rail"] for _, event in downs} == {name}
        late_s = max(late for late, _ in downs)
        show(f"node {node}: reported {late_s * 1e3:.0f} ms after the event: {downs[0][1]['text']}")
        timely(lambda late=late_s: late < VISIBLE_S, f"reported {late_s:.1f} s late", 0)
    stream.lab.heal(1, rail)
    eventually(f"rail {rail} UP", lambda: stream.is_up(rail), REJOIN_S)
    for sidecar in sidecars:
        eventually("ok again", lambda s=sidecar: s.ask("/health")["status"] == "ok")
        steps = sidecar.metric("r2serve_collective_seconds_count", collective="all_reduce")
        assert steps > 0
    stream.finish()
    for sidecar in sidecars:
        eventually("no engine", lambda s=sidecar: s.get("/readyz")[0] == 503)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", ["worker", "sidecar"])
def test_a_kill_loses_no_recorded_event(jobs, make_lab, sidecars, eventually, first: str) -> None:
    stream = stream_of(jobs, make_lab, sidecars)
    sidecar = sidecars[1]
    stream.lab.cut(1, 0)
    eventually("rail 0 DOWN", lambda: stream.is_out(0))
    stream.lab.heal(1, 0)
    eventually("rail 0 UP", lambda: stream.is_up(0), REJOIN_S)
    told = stream.ranks[1].ask({"do": "events"})
    eventually("all events", lambda: len(sidecar.events()) >= len(told))
    before = sidecar.events()
    if first == "sidecar":
        sidecar.kill()
    steps = stream.steps()
    eventually("further steps", lambda: stream.steps() > steps + 10)
    stream.ranks[1].process.kill()
    stream.ranks[1].process.wait()
    if first == "worker":
        eventually("ended", lambda: sidecar.get("/readyz")[0] == 503)
        # The sidecar may first know only that the worker is silent.
        ending = "ended without a graceful close: rank 1"
        eventually(ending, lambda: ending in "; ".join(sidecar.ask("/readyz")["reasons"]))
        eventually("worker not up", lambda: sidecar.metric("r2serve_worker_up") == 0)
        sidecar.kill()
    sidecar.start()
    after = sidecar.events()
    assert after[: len(before)] == before
    texts = [event["text"] for event in after]
    assert texts[: len(told)] == [event["text"] for event in told]
