"""What the sidecar answers, for its OpenAPI description and for whoever reads this."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, Field

from r2serve.observe.health import Health
from r2serve.observe.journal import BUCKETS_S
from r2serve.observe.sidecar.answers import example, instant
from r2serve.observe.watch import Told, Watch, Worker


class HealthView(BaseModel):
    model_config = example(
        status="degraded", reasons=["rank 0: rail1@node0 to rank 1 is DOWN (carrier_loss)"]
    )
    status: Literal["ok", "degraded", "failing", "no-engine"]
    reasons: list[str] = Field(description="Why it is not ok, one sentence each.")

    @classmethod
    def of(cls, health: Health) -> HealthView:
        return cls.model_validate({"status": health.status, "reasons": list(health.reasons)})


class WorkerView(BaseModel):
    model_config = example(
        key="4242-9f3c01aa",
        label="rank 0",
        process=4242,
        node="node0",
        status="running",
        opened="2026-11-22T05:11:00.123456Z",
        groups=["tp:0"],
    )
    key: str = Field(description="Names the worker in other answers and in metrics.")
    label: str
    process: int = Field(description="The operating system's number of it.")
    node: str
    status: Literal["running", "silent", "closed", "ended"] = Field(
        description="closed: it closed its links in order; ended: it did not."
    )
    opened: datetime = Field(description="When it made its journal.")
    groups: list[str] = Field(description="Its communicators.")

    @classmethod
    def of(cls, worker: Worker) -> WorkerView:
        read = worker.journal
        return cls(
            key=worker.key,
            label=worker.label,
            process=read.process,
            node=worker.node,
            status=worker.status,  # type: ignore[arg-type]
            opened=instant(read.opened_clock_ns),
            groups=[group.name for group in read.groups if not group.closed],
        )


class RailView(BaseModel):
    model_config = example(
        worker="4242-9f3c01aa",
        label="rank 0",
        name="rail1@node0",
        peer="rank 1",
        kind="verbs",
        device="mlx5_1:1",
        state="DOWN",
        since="2026-11-22T05:11:00.123456Z",
        cause="carrier_loss",
        verdict="local NIC",
        slow=False,
        epoch=3,
        tx_bytes=123456789,
        rx_bytes=123456780,
        tx_bytes_per_s=0.0,
        rx_bytes_per_s=0.0,
        replayed_chunks=12,
        hedged_chunks=0,
        round_trip_us=11.2,
    )
    worker: str = Field(description="Key of the worker whose end of the rail this is.")
    label: str
    name: str
    peer: str
    kind: str = Field(description="tcp, verbs, shm; control: the management NIC.")
    device: str = Field(description="The interface, or the RDMA device and port.")
    state: str = Field(description="CONNECTING, PROBATION, UP, SUSPECT, DOWN or FENCING.")
    since: datetime = Field(description="When it came to be in this state.")
    cause: str = Field(description="What was noticed first when it was lost last; none: nothing.")
    verdict: str = Field(description="Where the fault is: local NIC, remote NIC, path, transient.")
    slow: bool
    epoch: int
    tx_bytes: int
    rx_bytes: int
    tx_bytes_per_s: float
    rx_bytes_per_s: float
    replayed_chunks: int
    hedged_chunks: int
    round_trip_us: float

    @classmethod
    def all_of(cls, worker: Worker) -> list[RailView]:
        made = []
        for entry, rail in enumerate(worker.journal.rails):
            rates = worker.rate(entry)
            made.append(
                cls(
                    worker=worker.key,
                    label=worker.label,
                    name=rail.name,
                    peer=rail.peer,
                    kind=rail.kind,
                    device=rail.device,
                    state=rail.state,
                    since=instant(worker.journal.clock_ns(rail.since_ns)),
                    cause=rail.cause,
                    verdict=rail.verdict,
                    slow=rail.slow,
                    epoch=rail.epoch,
                    tx_bytes=rail.tx_bytes,
                    rx_bytes=rail.rx_bytes,
                    tx_bytes_per_s=rates.tx,
                    rx_bytes_per_s=rates.rx,
                    replayed_chunks=rail.replayed_chunks,
                    hedged_chunks=rail.hedged_chunks,
                    round_trip_us=rail.round_trip_ns / 1e3,
                )
            )
        return made


class RailsView(BaseModel):
    rails: list[RailView]

    @classmethod
    def of(cls, watch: Watch) -> RailsView:
        return cls(rails=[view for worker in watch.live() for view in RailView.all_of(worker)])


class CollectiveView(BaseModel):
    model_config = example(
        worker="4242-9f3c01aa",
        label="rank 0",
        group="tp:0",
        collective="all_reduce",
        calls=3,
        total_s=0.00021,
        bytes=49152,
        stalled_s=0.0,
        buckets=[0, 0, 0, 0, 1, 2, *[0] * 18],
    )
    worker: str
    label: str
    group: str
    collective: str
    calls: int
    total_s: float
    bytes: int = Field(description="Of this rank's larger buffers.")
    stalled_s: float = Field(description="Time that rail events cost all calls of the group.")
    buckets: list[int] = Field(description="Calls by duration, each in one bucket.")

    @classmethod
    def all_of(cls, worker: Worker) -> list[CollectiveView]:
        return [
            cls(
                worker=worker.key,
                label=worker.label,
                group=group.name,
                collective=collective,
                calls=latency.calls,
                total_s=latency.total_ns / 1e9,
                bytes=latency.bytes,
                stalled_s=group.stalled_ns / 1e9,
                buckets=list(latency.buckets),
            )
            for group in worker.journal.groups
            if not group.closed
            for collective, latency in group.latencies.items()
        ]


class CollectivesView(BaseModel):
    bounds_s: list[float] = Field(
        description="Upper bounds of the buckets, in seconds; the last bucket has none."
    )
    collectives: list[CollectiveView]

    @classmethod
    def of(cls, watch: Watch) -> CollectivesView:
        return cls(
            bounds_s=list(BUCKETS_S[:-1]),
            collectives=[each for worker in watch.live() for each in CollectiveView.all_of(worker)],
        )


class TopologyView(BaseModel):
    workers: list[WorkerView] = Field(description="Those that have ended, too.")
    unreadable: dict[str, str] = Field(description="Why, by file, of journals of other versions.")

    @classmethod
    def of(cls, watch: Watch) -> TopologyView:
        return cls(
            workers=[WorkerView.of(worker) for worker in watch.known()],
            unreadable=dict(watch.unreadable),
        )


class EventView(BaseModel):
    model_config = example(
        id=1795324260123456,
        time="2026-11-22T05:11:00.123456Z",
        worker="4242-9f3c01aa",
        label="rank 0",
        kind="rail_state",
        rail="rail1@node0",
        peer="rank 1",
        epoch=3,
        text="UP->DOWN carrier_loss",
        group="",
        call=0,
        value=0,
        bytes=0,
    )
    id: int = Field(
        description="Rises with every event: its time in us since 1970, or one more than "
        "the event before."
    )
    time: datetime
    worker: str
    label: str
    kind: str = Field(
        description="rail_state, verdict, speed, stall, replay, hedge, abort or injected."
    )
    rail: str
    peer: str
    epoch: int = Field(description="Of the rail; of a stall the engine's step; 0: not known.")
    text: str
    group: str = Field(description="The communicator, of a stall or an abort.")
    call: int = Field(description="Number of the call within it.")
    value: int = Field(
        description="Of a stall ns, of a replay or a hedge chunks, of a change of speed bytes "
        "per second, of an abort its code."
    )
    bytes: int = Field(description="Of the call that was stalled.")

    @classmethod
    def of(cls, told: Told) -> EventView:
        event = told.event
        return cls(
            id=told.id,
            time=instant(told.clock_ns),
            worker=told.worker,
            label=told.label,
            kind=event.kind,
            rail=event.rail,
            peer=event.peer,
            epoch=event.epoch,
            text=event.text,
            group=told.group,
            call=event.call,
            value=event.value,
            bytes=event.detail,
        )


class EventsView(BaseModel):
    events: list[EventView] = Field(description="Oldest first.")
    next: int = Field(description="Ask with after=next for what follows.")
    first_kept: int = Field(description="Id of the oldest event that is still kept; 0: none is.")
