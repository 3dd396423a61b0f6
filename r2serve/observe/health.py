"""Health of the node: whether requests can be served. Basis of the sidecar's probes."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass

from r2serve.observe.watch import ENDED, SILENT, Watch, Worker

STUCK_S = 10.0
"""A longer collective counts as stuck, s; a failover takes less than a tenth of this time."""

OK, DEGRADED, FAILING, NO_ENGINE = "ok", "degraded", "failing", "no-engine"

_CARRYING = ("UP", "SUSPECT")


@dataclass(frozen=True)
class Health:
    """Health of the node. status: ok, degraded, failing or no-engine. reasons: one text each."""

    status: str
    reasons: tuple[str, ...] = ()

    @property
    def ready(self) -> bool:
        """True if requests are served, with all rails or with fewer."""
        return self.status in (OK, DEGRADED)


def examine(watch: Watch, stuck_s: float = STUCK_S) -> Health:
    """Examines all live workers. stuck_s: a longer collective counts as stuck, s."""
    workers = watch.live()
    if not workers:
        return Health(NO_ENGINE, (_why_none(watch),))
    failing = [reason for worker in workers for reason in _failing(worker, stuck_s)]
    if failing:
        return Health(FAILING, tuple(failing))
    degraded = [reason for worker in workers for reason in _degraded(worker)]
    return Health(DEGRADED if degraded else OK, tuple(degraded))


def _why_none(watch: Watch) -> str:
    text = f"no running worker has a journal in {watch.folder}"
    ended = [worker.label for worker in watch.known() if worker.status == ENDED]
    if ended:
        text += f"; ended without a graceful close: {', '.join(ended)}"
    for name, why in watch.unreadable.items():
        text += f"; {name}: {why}"
    return text


def _failing(worker: Worker, stuck_s: float) -> list[str]:
    now_ns = time.monotonic_ns()
    if worker.status == SILENT:
        silent_s = (now_ns - worker.journal.heartbeat_ns) / 1e9
        return [f"{worker.label}: the process has had no heartbeat for {silent_s:.0f} s"]
    reasons = []
    peers = defaultdict(list)
    for rail in worker.journal.rails:
        peers[rail.peer_engine].append(rail)
    for rails in peers.values():
        peer = rails[0].peer
        if rails[0].farewell:
            reasons.append(f"{worker.label}: {peer} has closed its links")
        elif not any(rail.may_carry and rail.state in _CARRYING for rail in rails):
            reasons.append(f"{worker.label}: no rail to {peer} is left")
    for group in worker.journal.groups:
        waited_s = (now_ns - group.call_began_ns) / 1e9
        if group.call and waited_s > stuck_s:
            reasons.append(
                f"{worker.label}: {group.call} of {group.name} has run for {waited_s:.0f} s"
            )
    return reasons


def _degraded(worker: Worker) -> list[str]:
    reasons = []
    for rail in worker.journal.rails:
        what = rail.state if rail.state != "UP" else "slow" if rail.slow else ""
        if not what:
            continue
        cause = "" if rail.cause == "none" else f" ({rail.cause})"
        verdict = "" if rail.verdict == "none" else f", verdict: {rail.verdict}"
        reasons.append(f"{worker.label}: {rail.name} to {rail.peer} is {what}{cause}{verdict}")
    return reasons
