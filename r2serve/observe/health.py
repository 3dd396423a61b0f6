"""Health of the node: whether requests can be served.

:func:`examine` is the only judge. The sidecar's probes, metrics and pages and the commands read its
answer, so that they agree.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from r2serve.observe.journal import RailCounters
from r2serve.observe.reasons import Reason, Single, named, port_reasons, together
from r2serve.observe.watch import ENDED, SILENT, Watch, Worker

STUCK_S = 5.0
"""Default silence of a peer's process, on all rails, after which its calls count as stuck, s."""
SHORT_OF_CPU = 0.1
"""Share of the time without CPU from which a host counts as short of CPU."""

OK, DEGRADED, FAILING, NO_ENGINE = "ok", "degraded", "failing", "no-engine"

_CARRYING = ("UP", "SUSPECT")


@dataclass(frozen=True)
class Health:
    """Health of the node.

    status: ok, degraded, failing or no-engine. reasons: a sentence per fault. notes: facts that
    change no status, because nothing is wrong with a rail. details: the reasons, and noted: the
    notes, with the ends that each touches.
    """

    status: str
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    details: tuple[Reason, ...] = field(default=(), compare=False)
    noted: tuple[Reason, ...] = field(default=(), compare=False)

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
            return _health(FAILING, [Reason("journals", self._blind)])
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
        return _health(NO_ENGINE, [Reason("engine", _why_none(watch, engine))])
    notes = [*_notes(workers), *(Reason(str(note), str(note)) for note in bare)]
    if failing := _failing(workers, stuck_s):
        return _health(FAILING, failing, notes)
    degraded = port_reasons(workers)
    degraded += [Reason(str(note), str(note)) for note in without]
    return _health(DEGRADED if degraded else OK, degraded, notes)


def _health(status: str, reasons: Sequence[Reason], notes: Sequence[Reason] = ()) -> Health:
    texts = tuple(reason.text for reason in reasons)
    noted = tuple(note.text for note in notes)
    return Health(status, texts, noted, tuple(reasons), tuple(notes))


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


@dataclass(frozen=True, eq=False)
class _Link:
    """The rails of a worker to a peer."""

    worker: Worker
    rails: list[RailCounters]

    @property
    def peer(self) -> str:
        return self.rails[0].peer

    @property
    def is_closed(self) -> bool:
        return self.rails[0].graceful_close

    @property
    def is_left(self) -> bool:
        return any(rail.may_carry and rail.state in _CARRYING for rail in self.rails)

    @property
    def unheard_s(self) -> float:
        return max(rail.unheard_ms for rail in self.rails) / 1e3

    def told(self, what: str) -> Single:
        return Single(self.worker.label, self.peer, f"{self.worker.label}: {what}")


def _links_of(worker: Worker) -> list[_Link]:
    peers = defaultdict(list)
    for rail in worker.journal.rails:
        peers[rail.peer_engine].append(rail)
    return [_Link(worker, rails) for rails in peers.values()]


def _failing(workers: list[Worker], stuck_s: float) -> list[Reason]:
    now_ns = time.monotonic_ns()
    silent: list[Worker] = []
    serving: list[Worker] = []
    for worker in workers:
        (silent if worker.status == SILENT else serving).append(worker)
    links = [link for worker in serving for link in _links_of(worker)]
    closed = [link.told(f"{link.peer} has closed its links") for link in links if link.is_closed]
    open_links = [link for link in links if not link.is_closed]
    gone = [link.told(f"no rail to {link.peer} is left") for link in open_links if not link.is_left]
    mute = [link for link in open_links if link.is_left and link.unheard_s > stuck_s]
    return [
        *_without_heartbeat(silent, now_ns),
        *together("links closed by peers", closed, "{peers}: links closed; {links}"),
        *together("peers without a rail", gone, "no rail to {peers} is left; {links}"),
        *_unheard(mute, now_ns),
    ]


def _unheard(mute: list[_Link], now_ns: int) -> list[Reason]:
    told = [
        link.told(
            f"{link.peer} has sent nothing on any rail for {link.unheard_s:.0f} s"
            f"{_longest_call([link.worker], now_ns)}"
        )
        for link in mute
    ]
    longest_s = max((link.unheard_s for link in mute), default=0.0)
    return together(
        "silent peers",
        told,
        f"{{peers}}: nothing sent on any rail for up to {longest_s:.0f} s; {{links}}"
        + _longest_call([link.worker for link in mute], now_ns),
    )


def _without_heartbeat(silent: list[Worker], now_ns: int) -> list[Reason]:
    ages_s = [(now_ns - worker.journal.heartbeat_ns) / 1e9 for worker in silent]
    texts = [
        f"{worker.label}: the process has had no heartbeat for {age_s:.0f} s"
        for worker, age_s in zip(silent, ages_s, strict=True)
    ]
    about, names = "workers without a heartbeat", tuple(worker.label for worker in silent)
    if len(texts) < 2:
        return [Reason(about, text, names=names) for text in texts]
    workers = named(names, "workers")
    text = f"{workers}: the processes have had no heartbeat for up to {max(ages_s):.0f} s"
    return [Reason(about, text, tuple(texts), names)]


def _longest_call(workers: list[Worker], now_ns: int) -> str:
    """Returns a text about the call that has run for longest; empty without a call."""
    calls = [group for worker in workers for group in worker.journal.groups if group.call]
    if not calls:
        return ""
    group = min(calls, key=lambda each: each.call_began_ns)
    ran_s = (now_ns - group.call_began_ns) / 1e9
    return f"; {group.call} of {group.name} has run for {ran_s:.0f} s"


def _notes(workers: list[Worker]) -> list[Reason]:
    short = [worker for worker in workers if worker.short_of_cpu >= SHORT_OF_CPU]
    texts = [
        f"{worker.label}: this host is short of CPU: the worker did not run for "
        f"{worker.short_of_cpu:.0%} of the last 10 s"
        for worker in short
    ]
    if len(texts) < 2:
        return [Reason("short of CPU", text) for text in texts]
    share = max(worker.short_of_cpu for worker in short)
    text = (
        f"this host is short of CPU: {named([worker.label for worker in short], 'workers')} did "
        f"not run for up to {share:.0%} of the last 10 s"
    )
    return [Reason("short of CPU", text, tuple(texts))]
