"""Prometheus metrics of the sidecar."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from r2serve.observe.health import Health, engines, examine
from r2serve.observe.journal import BUCKETS_S, RAIL_STATES, Group, Latency
from r2serve.observe.requests import Ended, Requests
from r2serve.observe.sidecar.peers import Peers
from r2serve.observe.watch import RUNNING, NumberedEvent, Watch, Worker

VERDICT_S = 5.0
"""A failover is counted with the verdict, or without a verdict after this time, s."""

_STALL_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_WORKER = ("worker", "process", "node", "host")
_ENGINE = ("model_name", "engine")
_RAIL = (*_WORKER, "rail", "peer", "peer_engine", "kind", "device")

_DRILL = (*_WORKER, "rail", "peer", "peer_engine", "kind")  # kind: of the fault

_RailKey = tuple[str, int, int]  # worker, entry of the rail, epoch


@dataclass
class _Stalls:
    total_s: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(_STALL_BUCKETS_S) + 1))

    def add(self, seconds: float) -> None:
        self.total_s += seconds
        self.buckets[bisect_left(_STALL_BUCKETS_S, seconds)] += 1


class Metrics(Collector):
    """Counts events of the watch, and renders the counts with the current state of workers."""

    def __init__(
        self,
        watch: Watch,
        peers: Peers | None = None,
        requests: Requests | None = None,
        judge: Callable[[str | None], Health] | None = None,
    ) -> None:
        """judge: shared with the probes, so that both agree; None: judges at each call."""
        self._watch = watch
        self._judge = judge or (lambda engine: examine(watch, engine=engine))
        self._requests = requests
        self._peers = peers or Peers(())
        self._failovers: Counter[tuple[str, ...]] = Counter()
        self._stalls: defaultdict[tuple[str, ...], _Stalls] = defaultdict(_Stalls)
        self._waits: defaultdict[tuple[str, ...], _Stalls] = defaultdict(_Stalls)
        self._unlocated: dict[_RailKey, tuple[float, tuple[str, ...]]] = {}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)  # process_*: the sidecar itself

    def take(self, told: Iterable[NumberedEvent]) -> None:
        """Counts new events; events must arrive in the order of their ids."""
        now_s = time.monotonic()
        self._forget()
        for one in told:
            who = (one.label, one.worker, one.node, one.host)
            event = one.event
            key = (one.worker, event.entry, event.epoch)
            if event.kind == "stall":
                self._stalls[(*who, one.group, event.text)].add(event.value / 1e9)
            elif event.kind == "rail_state" and event.value:  # loss of a rail in use
                cause = event.text.partition(" ")[2] or "none"
                injected = "true" if event.in_drill else "false"
                self._unlocated[key] = now_s, (*who, event.rail, event.peer, cause, injected)
            elif event.kind == "verdict" and key in self._unlocated:
                self._located(key, event.text)
            elif event.kind == "rail_state" and event.text.endswith("->UP"):
                for lost in [lost for lost in self._unlocated if lost[:2] == key[:2]]:
                    self._located(lost, "none")  # the rail is back, no verdict will follow
        for key in [
            key for key, (since_s, _) in self._unlocated.items() if now_s - since_s > VERDICT_S
        ]:
            self._located(key, "none")

    def take_requests(self, ended: Iterable[Ended]) -> None:
        """Counts ended requests with stalls."""
        for one in ended:
            worker = self._watch.workers.get(one.worker)
            who = (one.label, one.worker, *((worker.node, worker.host) if worker else ("", "")))
            for phase, stall_s in one.stall_s.items():
                self._waits[(*who, phase)].add(stall_s)

    def _located(self, key: _RailKey, verdict: str) -> None:
        _, labels = self._unlocated.pop(key)
        self._failovers[(*labels, verdict)] += 1

    def _forget(self) -> None:
        """Drops counts of workers without a journal in the watch."""
        for counted in (self._failovers, self._stalls, self._waits):
            for labels in [one for one in counted if one[1] not in self._watch.workers]:
                del counted[labels]

    def render(self) -> bytes:
        """Returns all metrics in the Prometheus text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics; called by the registry."""
        yield InfoMetricFamily(
            "r2serve_build", "Version of r2serve.", value={"version": version("r2serve")}
        )
        yield GaugeMetricFamily(
            "r2serve_ready", "1 if requests can be served.", value=self._judge(None).ready
        )
        yield self._ready_engines()
        yield GaugeMetricFamily(
            "r2serve_workers_without_journal",
            "Running workers that could make no journal; their rails are unknown.",
            value=len(self._watch.unobserved),
        )
        answers = GaugeMetricFamily(
            "r2serve_peer_up", "1 if the peer's sidecar answers.", labels=("peer",)
        )
        for member in self._peers.views():
            answers.add_metric((member.url,), member.answers)
        yield answers
        workers = self._watch.known()
        yield self._workers(workers)
        yield self._short_of_cpu(workers)
        yield self._engines(workers)
        yield from self._rails(self._watch.live())
        yield from self._collectives(workers)
        yield self._failover_total()
        yield self._histogram(
            "r2serve_failover_stall_seconds",
            "Stall time of collectives caused by rail events, in seconds.",
            (*_WORKER, "group", "collective"),
            self._stalls,
        )
        yield self._histogram(
            "r2serve_request_stall_seconds",
            "Stall time of ended requests caused by rail events; only requests with a stall.",
            (*_WORKER, "phase"),
            self._waits,
        )

    def _ready_engines(self) -> Metric:
        ready = GaugeMetricFamily(
            "r2serve_serving_engine_ready",
            "1 if the serving engine's requests can be served.",
            labels=("serving_engine",),
        )
        for name in engines(self._watch):
            ready.add_metric((name,), self._judge(name).ready)
        return ready

    def _workers(self, workers: list[Worker]) -> Metric:
        up = GaugeMetricFamily(
            "r2serve_worker_up", "1 if the worker runs and has a heartbeat.", labels=_WORKER
        )
        for worker in workers:
            up.add_metric(_who(worker), worker.status == RUNNING)
        return up

    def _engines(self, workers: list[Worker]) -> Metric:
        """Returns a metric with vLLM's labels, to join r2serve's metrics with vLLM's."""
        info = GaugeMetricFamily(
            "r2serve_engine_info",
            "Always 1; the labels name the worker's model and engine.",
            labels=(*_WORKER, *_ENGINE),
        )
        about = self._requests.about() if self._requests else {}
        for worker in workers:
            if said := about.get(worker.key):
                info.add_metric((*_who(worker), *(said.get(name, "") for name in _ENGINE)), 1)
        return info

    def _rails(self, workers: list[Worker]) -> Iterator[Metric]:
        up = GaugeMetricFamily("r2serve_rail_up", "1 if the rail is in state UP.", labels=_RAIL)
        state = GaugeMetricFamily(
            "r2serve_rail_state", "1 for the current state, 0 for others.", labels=(*_RAIL, "state")
        )
        since = GaugeMetricFamily(
            "r2serve_rail_state_since_timestamp_seconds",
            "Begin of the present state, in seconds since 1970; of a lost rail, of the loss.",
            labels=_RAIL,
        )
        slow = GaugeMetricFamily(
            "r2serve_rail_slow",
            "1 if the rail is much slower than the fastest rail to the peer.",
            labels=_RAIL,
        )
        absent = GaugeMetricFamily(
            "r2serve_rail_never_up",
            "1 if the rail has never been up since the start of the worker; a lost rail has 0.",
            labels=_RAIL,
        )
        trip = GaugeMetricFamily(
            "r2serve_rail_round_trip_seconds",
            "Smoothed round trip of probes and frames, in seconds.",
            labels=_RAIL,
        )
        moved = CounterMetricFamily(
            "r2serve_rail_bytes",
            "Bytes sent (tx) and received (rx), frame headers and payload.",
            labels=(*_RAIL, "direction"),
        )
        replayed = CounterMetricFamily(
            "r2serve_rail_replayed_chunks",
            "Chunks sent again on another rail because this rail was lost or suspected.",
            labels=_RAIL,
        )
        hedged = CounterMetricFamily(
            "r2serve_rail_hedged_chunks",
            "Part of the replayed chunks sent while this rail was only suspected.",
            labels=_RAIL,
        )
        epochs = CounterMetricFamily(
            "r2serve_rail_connections", "Connections of the rail, rejoins included.", labels=_RAIL
        )
        drill = GaugeMetricFamily(
            "r2serve_drill_active",
            "1 while a drill by either end of the rail explains what happens to the rail.",
            labels=_DRILL,
        )
        for worker in workers:
            for entry, rail in enumerate(worker.journal.rails):
                peer = (rail.peer, f"{rail.peer_engine:x}")
                labels = (*_who(worker), rail.name, *peer, rail.kind, rail.device)
                up.add_metric(labels, rail.state == "UP")
                for each in RAIL_STATES:
                    state.add_metric((*labels, each), rail.state == each)
                if begun_ns := worker.since_ns(entry) or rail.since_ns:
                    since.add_metric(labels, worker.journal.clock_ns(begun_ns) / 1e9)
                slow.add_metric(labels, rail.slow)
                absent.add_metric(labels, rail.presence == "never up")
                trip.add_metric(labels, rail.round_trip_ns / 1e9)
                moved.add_metric((*labels, "tx"), rail.tx_bytes)
                moved.add_metric((*labels, "rx"), rail.rx_bytes)
                replayed.add_metric(labels, rail.replayed_chunks)
                hedged.add_metric(labels, rail.hedged_chunks)
                epochs.add_metric(labels, rail.epoch)
                if rail.drill:
                    drill.add_metric((*_who(worker), rail.name, *peer, rail.drill), 1)
        yield from (up, state, since, slow, absent, trip, moved, replayed, hedged, epochs, drill)

    def _short_of_cpu(self, workers: list[Worker]) -> Metric:
        short = CounterMetricFamily(
            "r2serve_worker_short_of_cpu_seconds",
            "Time in which the worker was ready to run and did not run, as its own engine saw.",
            labels=_WORKER,
        )
        for worker in workers:
            short.add_metric(_who(worker), worker.journal.short_of_cpu_ns / 1e9)
        return short

    def _collectives(self, workers: list[Worker]) -> Iterator[Metric]:
        labels = (*_WORKER, "group", "collective")
        seconds = HistogramMetricFamily(
            "r2serve_collective_seconds", "Duration of collectives, in seconds.", labels=labels
        )
        moved = CounterMetricFamily(
            "r2serve_collective_bytes",
            "Bytes of the rank's larger buffer (input or output), summed over calls.",
            labels=labels,
        )
        stalled = CounterMetricFamily(
            "r2serve_group_stalled_seconds",
            "Stall time of the group's collectives caused by rail events, in seconds.",
            labels=labels[:-1],
        )
        failed = CounterMetricFamily(
            "r2serve_group_failed_calls", "Collectives ended by an error.", labels=labels[:-1]
        )
        for worker in workers:
            for name, groups in _by_name(worker).items():
                who = (*_who(worker), name)
                stalled.add_metric(who, sum(group.stalled_ns for group in groups) / 1e9)
                failed.add_metric(who, sum(group.failed_calls for group in groups))
                for collective, latency in _sum_of(groups).items():
                    buckets = _cumulated(BUCKETS_S, latency.buckets)
                    seconds.add_metric((*who, collective), buckets, latency.total_ns / 1e9)
                    moved.add_metric((*who, collective), latency.bytes)
        yield from (seconds, moved, stalled, failed)

    def _failover_total(self) -> Metric:
        total = CounterMetricFamily(
            "r2serve_failover",
            "Rails lost while in use, by cause and verdict. injected: true during a drill.",
            labels=(*_WORKER, "rail", "peer", "cause", "injected", "verdict"),
        )
        for labels, count in self._failovers.items():
            total.add_metric(labels, count)
        return total

    @staticmethod
    def _histogram(
        name: str, text: str, labels: Sequence[str], counted: Mapping[tuple[str, ...], _Stalls]
    ) -> Metric:
        family = HistogramMetricFamily(name, text, labels=labels)
        for values, found in counted.items():
            buckets = _cumulated((*_STALL_BUCKETS_S, float("inf")), found.buckets)
            family.add_metric(values, buckets, found.total_s)
        return family


def _who(worker: Worker) -> tuple[str, str, str, str]:
    return worker.label, worker.key, worker.node, worker.host


def _by_name(worker: Worker) -> dict[str, list[Group]]:
    """Groups communicators by name; an engine may close a group and reuse the name."""
    found: defaultdict[str, list[Group]] = defaultdict(list)
    for group in worker.journal.groups:
        found[group.name].append(group)
    return found


def _sum_of(groups: list[Group]) -> dict[str, Latency]:
    found: defaultdict[str, list[Latency]] = defaultdict(list)
    for group in groups:
        for collective, latency in group.latencies.items():
            found[collective].append(latency)
    return {
        collective: Latency(
            calls=sum(one.calls for one in all_of),
            total_ns=sum(one.total_ns for one in all_of),
            bytes=sum(one.bytes for one in all_of),
            buckets=tuple(map(sum, zip(*(one.buckets for one in all_of), strict=True))),
        )
        for collective, all_of in found.items()
    }


def _cumulated(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Returns cumulative buckets, as Prometheus histograms require."""
    names = ["+Inf" if bound == float("inf") else str(float(bound)) for bound in bounds]
    return list(zip(names, accumulate(counts), strict=True))
