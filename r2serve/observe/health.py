"""Health of the node: whether requests can be served.

:func:`examine` is the only judge. The sidecar's probes, metrics and pages and the commands read its
answer, so that they agree.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass

from r2serve.observe.watch import ENDED, SILENT, Watch, Worker

STUCK_S = 5.0
"""Default silence of a peer's process, on all rails, after which its calls count as stuck, s."""
SHORT_OF_CPU = 0.1
"""Share of the time without CPU from which a host counts as short of CPU."""

OK, DEGRADED, FAILING, NO_ENGINE = "ok", "degraded", "failing", "no-engine"

_CARRYING = ("UP", "SUSPECT")


@dataclass(frozen=True)
class Health:
    """Health of the node. status: ok, degraded, failing or no-engine. reasons: one text each.

    notes: facts that change no status, because nothing is wrong with a rail.
    """

    status: str
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ready(self) -> bool:
        """True if requests are served, with all rails or with fewer."""
        return self.status in (OK, DEGRADED)


class Judge:
    """Health of a watch's node, judged once per look: all answers of a look are equal."""

    def __init__(self, watch: Watch, stuck_s: float = STUCK_S) -> None:
        self._watch = watch
        self._stuck_s = stuck_s
        self._blind = ""
        self._found: dict[str | None, Health] = {}

    def looked(self) -> None:
        """Forgets the judgements after a look of the watch."""
        self._blind = ""
        self._found.clear()

    def failed(self, why: str) -> None:
        """Judges the node as failing until the next look, because nothing is known of it."""
        self._blind = why
        self._found.clear()

    def __call__(self, engine: str | None = None) -> Health:
        """Returns the health of the node, or of the serving engine of this name."""
        if self._blind:
            return Health(FAILING, (self._blind,))
        if engine not in self._found:
            found = examine(self._watch, self._stuck_s, engine)
            if engine is not None and found.status == NO_ENGINE:
                return found  # clients choose such names, and memory is bounded
            self._found[engine] = found
        return self._found[engine]


def examine(watch: Watch, stuck_s: float = STUCK_S, engine: str | None = None) -> Health:
    """Examines the live workers.

    Args:
        stuck_s: silence of a peer's process, on all rails, from which calls count as stuck, s.
        engine: only the workers of the serving engine of this name; None: all workers.

    A long call alone is no fault: a rank may wait for as long as another one computes, and the
    peer's background thread answers meanwhile. A worker without a journal counts as serving:
    nothing is known against it. An engine without rails serves, too: nothing can fail over.
    """
    workers = [one for one in watch.live() if engine in (None, one.journal.serving_engine)]
    without = [one for one in watch.unobserved if engine in (None, one.serving_engine)]
    bare = [one for one in watch.unprotected if engine in (None, one.serving_engine)]
    if not workers and not without and not bare:
        return Health(NO_ENGINE, (_why_none(watch, engine),))
    said = tuple(note for worker in workers for note in _notes(worker)) + tuple(map(str, bare))
    failing = [reason for worker in workers for reason in _failing(worker, stuck_s)]
    if failing:
        return Health(FAILING, tuple(failing), said)
    degraded = [reason for worker in workers for reason in _degraded(worker)]
    degraded += [str(unobserved) for unobserved in without]
    return Health(DEGRADED if degraded else OK, tuple(degraded), said)


def engines(watch: Watch) -> list[str]:
    """Returns the names of the serving engines with running workers."""
    names = {one.journal.serving_engine for one in watch.live()}
    names |= {one.serving_engine for one in (*watch.unobserved, *watch.unprotected)}
    return sorted(names - {""})  # workers without a serving engine have no name


def _why_none(watch: Watch, engine: str | None) -> str:
    of = f" of engine {engine!r}" if engine is not None else ""
    text = f"no running worker{of} has a journal in {watch.folder}"
    if not watch.folder.is_dir():
        text += ", which does not exist"
    if engine is not None and (others := engines(watch)):
        text += f"; engines here: {', '.join(map(repr, others))}"
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
        unheard_s = max(rail.unheard_ms for rail in rails) / 1e3
        if rails[0].graceful_close:
            reasons.append(f"{worker.label}: {peer} has closed its links")
        elif not any(rail.may_carry and rail.state in _CARRYING for rail in rails):
            reasons.append(f"{worker.label}: no rail to {peer} is left")
        elif unheard_s > stuck_s:
            reasons.append(
                f"{worker.label}: {peer} has sent nothing on any rail for {unheard_s:.0f} s"
                f"{_longest_call(worker, now_ns)}"
            )
    return reasons


def _longest_call(worker: Worker, now_ns: int) -> str:
    """Returns a text about the call that has run for longest; empty without a call."""
    calls = [group for group in worker.journal.groups if group.call]
    if not calls:
        return ""
    group = min(calls, key=lambda each: each.call_began_ns)
    ran_s = (now_ns - group.call_began_ns) / 1e9
    return f"; {group.call} of {group.name} has run for {ran_s:.0f} s"


def _degraded(worker: Worker) -> list[str]:
    reasons = []
    for rail in worker.journal.rails:
        if rail.presence == "never up":
            why = rail.never_up.replace("_", " ") or f"still {rail.state}"
            reasons.append(f"{worker.label}: {rail.name} to {rail.peer} has never been up ({why})")
            continue
        what = rail.state if rail.state != "UP" else "slow" if rail.slow else ""
        if not what:
            continue
        cause = "" if rail.cause == "none" else f" ({rail.cause})"
        verdict = "" if rail.verdict == "none" else f", verdict: {rail.verdict}"
        drill = f", drill: {rail.drill}" if rail.drill else ""
        about = f"{rail.name} to {rail.peer} is {what}{cause}{verdict}{drill}"
        reasons.append(f"{worker.label}: {about}")
    return reasons


def _notes(worker: Worker) -> list[str]:
    if worker.short_of_cpu < SHORT_OF_CPU:
        return []
    return [
        f"{worker.label}: this host is short of CPU: the worker did not run for "
        f"{worker.short_of_cpu:.0%} of the last 10 s"
    ]
