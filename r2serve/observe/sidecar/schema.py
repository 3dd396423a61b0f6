"""Models of the sidecar's answers, described in OpenAPI."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, Field

from r2serve.observe.health import Health
from r2serve.observe.journal import BUCKETS_S
from r2serve.observe.sidecar.responses import example, instant
from r2serve.observe.watch import NumberedEvent, Watch, Worker

_REASON = (
    "rail1@node0 (eth1/mlx5_1:1) on gpu-host-17 is DOWN (reconnecting) since 2026-11-22 "
    "05:11:00+00:00: carrier_loss, fault at the local NIC; 64 links of 8 workers to 8 peers"
)
_END = (
    "rank 0: rail1@node0 to rank 8 is DOWN (reconnecting) since 2026-11-22 05:11:00+00:00: "
    "carrier_loss, fault at the local NIC"
)


class ReasonView(BaseModel):
    model_config = example(
        about="rail1@node0 (eth1/mlx5_1:1) on gpu-host-17", text=_REASON, ends=[_END]
    )
    about: str = Field(description="Subject of the fault; equal as long as the fault lasts.")
    text: str
    ends: list[str] = Field(
        description="A text per end of a rail, or per worker, that the fault touches; empty if "
        "the text tells everything."
    )


class HealthView(BaseModel):
    model_config = example(
        status="degraded",
        reasons=[_REASON],
        notes=[
            "rank 0: this host is short of CPU: the worker did not run for 23% of the last 10 s"
        ],
        engines={"4242": "degraded"},
        details=[],
    )
    status: Literal["ok", "degraded", "failing", "no-engine"]
    reasons: list[str] = Field(description="A sentence per fault: port, host and links.")
    notes: list[str] = Field(
        default_factory=list,
        description="Facts that change no status, such as a shortage of CPU, or an engine without "
        "rails.",
    )
    engines: dict[str, str] = Field(
        default_factory=dict,
        description="Status of each serving engine of this node, by name; empty if one was asked "
        "for. The name is R2CCL_SERVING_ENGINE, or the process id of the engine's first process.",
    )

    details: list[ReasonView] = Field(
        default_factory=list,
        description="The reasons and then the notes, with the ends of rails that each touches; "
        "in answers of /health only.",
    )

    @classmethod
    def of(
        cls, health: Health, engines: dict[str, str] | None = None, *, details: bool = False
    ) -> HealthView:
        told = (*health.details, *health.noted) if details else ()
        return cls.model_validate(
            {
                "status": health.status,
                "reasons": list(health.reasons),
                "notes": list(health.notes),
                "engines": engines or {},
                "details": [
                    {"about": one.about, "text": one.text, "ends": one.ends} for one in told
                ],
            }
        )


class WorkerView(BaseModel):
    model_config = example(
        key="4242-9f3c01aa",
        label="rank 0",
        process=4242,
        node="node0",
        host="gpu-host-17",
        status="running",
        serving_engine="4242",
        opened="2026-11-22T05:11:00.123456Z",
        groups=["tp:0"],
    )
    key: str = Field(
        description="Unique key of the worker; in metrics the value of the label process."
    )
    label: str
    process: int = Field(description="Process id.")
    node: str
    host: str = Field(default="", description="Name of the worker's host.")
    status: Literal["running", "silent", "closed", "ended"] = Field(
        description="silent: no heartbeat for 5 s; closed: all links closed gracefully; ended: "
        "the process ended without a graceful close."
    )
    serving_engine: str = Field(
        default="", description="Name of the worker's serving engine; empty = none."
    )
    opened: datetime = Field(description="Creation time of the worker's journal.")
    groups: list[str] = Field(description="Open communicators of the worker.")

    @classmethod
    def of(cls, worker: Worker) -> WorkerView:
        read = worker.journal
        return cls(
            key=worker.key,
            label=worker.label,
            process=read.process,
            node=worker.node,
            host=worker.host,
            status=worker.status,  # type: ignore[arg-type]
            serving_engine=read.serving_engine,
            opened=instant(read.opened_clock_ns),
            groups=[group.name for group in read.groups if not group.closed],
        )


class RailView(BaseModel):
    model_config = example(
        worker="4242-9f3c01aa",
        label="rank 0",
        host="gpu-host-17",
        name="rail1@node0",
        peer="rank 1",
        kind="verbs",
        device="eth1/mlx5_1:1",
        state="DOWN",
        since="2026-11-22T05:11:00.123456Z",
        cause="carrier_loss",
        verdict="local NIC",
        slow=False,
        presence="lost",
        never_up="",
        reserve=False,
        drill="",
        epoch=3,
        tx_bytes=123456789,
        rx_bytes=123456780,
        tx_bytes_per_s=0.0,
        rx_bytes_per_s=0.0,
        replayed_chunks=12,
        hedged_chunks=0,
        round_trip_us=11.2,
    )
    worker: str = Field(description="Key of the worker at this end of the rail.")
    label: str
    host: str = Field(default="", description="Name of the host at this end of the rail.")
    name: str
    peer: str
    kind: str = Field(description="tcp, verbs, shm, or control (the management NIC).")
    device: str = Field(
        description="Network interface, for verbs with RDMA device and port, as in eth0/mlx5_0:1."
    )
    state: str = Field(description="CONNECTING, PROBATION, UP, SUSPECT, DOWN or FENCING.")
    since: datetime = Field(
        description="Time of the last state change; for a lost rail, of the loss."
    )
    cause: str = Field(description="First symptom of the last loss; none = no cause recorded.")
    verdict: str = Field(
        description="Location of the last fault: local NIC, remote NIC, path, transient, peer; "
        "none = not localised."
    )
    slow: bool
    presence: Literal["up", "lost", "never up"] = Field(
        description="lost: the rail has been up before; never up: not since the start."
    )
    never_up: str = Field(
        description="Reason why the rail has never been up: refused, no_route, own_address, "
        "no_answer, rejected, probe_unanswered or no_connection; empty = none known."
    )
    reserve: bool = Field(description="The rail carries data only while no other rail is up.")
    drill: str = Field(
        default="",
        description="Fault kind of a drill by either end that explains the rail's state; unknown; "
        "empty = no drill.",
    )
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
                    host=worker.host,
                    name=rail.name,
                    peer=rail.peer,
                    kind=rail.kind,
                    device=rail.device,
                    state=rail.state,
                    since=instant(worker.journal.clock_ns(worker.since_ns(entry) or rail.since_ns)),
                    cause=rail.cause,
                    verdict=rail.verdict,
                    slow=rail.slow,
                    presence=rail.presence,  # type: ignore[arg-type]
                    never_up=rail.never_up,
                    reserve=rail.reserve,
                    drill=rail.drill,
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
    bytes: int = Field(description="Sum of this rank's larger buffer (input or output) per call.")
    stalled_s: float = Field(
        description="Stall time of all calls of the group, caused by rail events."
    )
    buckets: list[int] = Field(description="Calls per duration bucket, not cumulative.")

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
        description="Upper bounds of the buckets, in seconds; the last bucket is unbounded."
    )
    collectives: list[CollectiveView]

    @classmethod
    def of(cls, watch: Watch) -> CollectivesView:
        return cls(
            bounds_s=list(BUCKETS_S[:-1]),
            collectives=[each for worker in watch.live() for each in CollectiveView.all_of(worker)],
        )


class TopologyView(BaseModel):
    workers: list[WorkerView] = Field(description="Running and ended workers.")
    unreadable: dict[str, str] = Field(description="Error per unreadable journal, by file.")

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
        host="gpu-host-17",
        kind="rail_state",
        rail="rail1@node0",
        peer="rank 1",
        epoch=3,
        text="UP->DOWN carrier_loss",
        drill=False,
        group="",
        call=0,
        value=0,
        bytes=0,
    )
    id: int = Field(
        description="Strictly increasing: time in us since 1970, or the previous id plus 1."
    )
    time: datetime
    worker: str
    label: str
    host: str
    kind: str = Field(
        description="rail_state, verdict, speed, stall, replay, hedge, abort, injected or "
        "short_of_cpu."
    )
    rail: str
    peer: str
    epoch: int = Field(description="Epoch of the rail; step of the engine for a stall; 0 unknown.")
    text: str
    drill: bool = Field(description="A drill by either end of the rail explains the event.")
    group: str = Field(description="Communicator of a stall or abort.")
    call: int = Field(description="Number of the call within the communicator.")
    value: int = Field(
        description="stall, short_of_cpu: ns; replay, hedge: chunks; speed: bytes per second; "
        "abort: error code; rail_state: 1 for the loss of a rail in use."
    )
    bytes: int = Field(description="Size of the stalled call.")

    @classmethod
    def of(cls, told: NumberedEvent) -> EventView:
        event = told.event
        return cls(
            id=told.id,
            time=instant(told.clock_ns),
            worker=told.worker,
            label=told.label,
            host=told.host,
            kind=event.kind,
            rail=event.rail,
            peer=event.peer,
            epoch=event.epoch,
            text=event.text,
            drill=event.in_drill,
            group=told.group,
            call=event.call,
            value=event.value,
            bytes=event.detail if event.kind == "stall" else 0,
        )


class EventsView(BaseModel):
    events: list[EventView] = Field(description="Oldest first.")
    next: int = Field(description="Value of `after` for the next page.")
    first_kept: int = Field(description="Id of the oldest kept event; 0 = no event.")


class NodeView(BaseModel):
    """State of a sidecar's own node."""

    health: HealthView
    workers: list[WorkerView]
    rails: list[RailView]

    @classmethod
    def of(cls, health: Health, watch: Watch) -> NodeView:
        return cls(
            health=HealthView.of(health),
            workers=TopologyView.of(watch).workers,
            rails=RailsView.of(watch).rails,
        )


class MemberView(BaseModel):
    url: str = Field(description="Address of the member's sidecar; empty for this sidecar.")
    answers: bool
    error: str = Field(description="Error of the last poll; empty if answered.")
    asked: datetime | None = Field(description="Time of the last answer; null = never.")
    node: NodeView | None = Field(description="Last answer; null = never.")
