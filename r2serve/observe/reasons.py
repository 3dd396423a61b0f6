"""Reasons for a health other than ok: a sentence per fault, with the ends of rails that it touches.

A dead port of a node with 8 workers and 8 peers touches 64 ends of its rail. People need the port,
the host and the number of links; the single ends are details.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from r2serve.observe.journal import RailCounters
from r2serve.observe.port_state import DOWN, FROM_BEST_TO_WORST, NEVER_UP, SLOW, UP, state_of
from r2serve.observe.watch import Worker

NAMED = 3
"""Names of workers or peers in a sentence; further names are only counted."""


@dataclass(frozen=True)
class Reason:
    """A fault in words.

    about: subject of the fault, equal as long as the fault lasts. text: the sentence. ends: a text
    per end that the fault touches; empty if the sentence tells everything. names: peers or workers
    with this fault, if the fault of another one is news.
    """

    about: str
    text: str
    ends: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Single:
    """A fault as a single worker sees it. worker: its label. peer: label of the peer, or empty."""

    worker: str
    peer: str
    text: str


def together(about: str, found: list[Single], many: str) -> list[Reason]:
    """Returns one reason for equal faults of several workers or peers; none for no fault.

    many: the sentence, with ``{peers}`` and ``{links}``; a single fault has its own text instead.
    """
    if not found:
        return []
    names = tuple(dict.fromkeys(one.peer for one in found))
    if len(found) == 1:
        return [Reason(about, found[0].text, names=names)]
    links = f"{len(found)} links of {named([one.worker for one in found], 'workers')}"
    text = many.replace("{peers}", named(names, "peers")).replace("{links}", links)
    return [Reason(about, text, tuple(one.text for one in found), names)]


def named(names: Iterable[str], kind: str) -> str:
    """Returns up to NAMED different names, or the number of names: ``8 workers``."""
    each = list(dict.fromkeys(names))
    return ", ".join(each) if len(each) <= NAMED else f"{len(each)} {kind}"


def moment(clock_ns: int) -> str:
    """Returns the local date and time with the offset from UTC; clock_ns: CLOCK_REALTIME."""
    return datetime.fromtimestamp(clock_ns // 1_000_000_000).astimezone().isoformat(" ")


@dataclass(frozen=True, eq=False)
class _End:
    """An end of a rail that is not UP, or slow."""

    worker: Worker
    rail: RailCounters
    state: str
    since_clock_ns: int
    """Begin of the state, CLOCK_REALTIME; 0 = unknown."""


_Port = tuple[str, str, str, str]
"""Host, name of the rail, device, kind."""


def port_reasons(workers: Iterable[Worker]) -> list[Reason]:
    """Returns a reason per port that is not UP or slow, the worst first.

    Ends in a drill have a reason of their own, because a drill is no fault.
    """
    links: Counter[_Port] = Counter()
    ends: dict[tuple[_Port, str], list[_End]] = {}
    for worker in workers:
        for entry, rail in enumerate(worker.journal.rails):
            port = worker.host, rail.name, rail.device, rail.kind
            links[port] += 1
            state = state_of(rail)
            if state != UP:
                since_ns = worker.since_ns(entry)
                clock_ns = worker.journal.clock_ns(since_ns) if since_ns else 0
                end = _End(worker, rail, state, clock_ns)
                ends.setdefault((port, rail.drill), []).append(end)
    worst_first = sorted(ends.items(), key=lambda each: -_worst(each[1]))
    return [_reason(port, drill, found, links[port]) for (port, drill), found in worst_first]


def _worst(ends: list[_End]) -> int:
    return max(FROM_BEST_TO_WORST.index(end.state) for end in ends)


def _reason(port: _Port, drill: str, ends: list[_End], links: int) -> Reason:
    host, name, device, _ = port
    where = name + (f" ({device})" if device else "") + (f" on {host}" if host else "")
    worst = FROM_BEST_TO_WORST[_worst(ends)]
    leading = [end for end in ends if end.state == worst]
    text = f"{where} {_condition(leading, drill)}; {_links(leading, links)}"
    for state, count in Counter(end.state for end in ends if end.state != worst).items():
        text += f", {count} more {state}"
    about = f"{where}, drill: {drill}" if drill else where
    return Reason(about, text, tuple(_end(end) for end in ends))


def _end(end: _End) -> str:
    rail = end.rail
    return f"{end.worker.label}: {rail.name} to {rail.peer} {_condition([end], rail.drill)}"


def _condition(ends: list[_End], drill: str) -> str:
    """Returns state, begin, causes and place of a fault that several ends see."""
    state = ends[0].state
    begins = [end.since_clock_ns for end in ends if end.since_clock_ns]
    since = f" since {moment(min(begins))}" if begins and state != NEVER_UP else ""
    why = ", ".join([*_causes(ends), *([f"drill: {drill}"] if drill else [])])
    return f"{_state(ends)}{since}{f': {why}' if why else ''}"


def _state(ends: list[_End]) -> str:
    state = ends[0].state
    if state == NEVER_UP:
        return "has never been up"
    if state == SLOW:
        return "is slow"
    # A lost rail that connects again, or is tested, is still lost.
    again = state == DOWN and any(end.rail.state != DOWN for end in ends)
    return f"is {state} (reconnecting)" if again else f"is {state}"


def _causes(ends: list[_End]) -> list[str]:
    """Returns the causes of the ends, the most frequent first, and where the fault is."""
    state = ends[0].state
    if state == SLOW:
        return []
    rails = [end.rail for end in ends]
    if state == NEVER_UP:
        return _frequent(rail.never_up.replace("_", " ") or f"still {rail.state}" for rail in rails)
    verdicts = _frequent(rail.verdict for rail in rails if rail.verdict != "none")
    places = [one for one in verdicts if one != "transient"]
    at = [f"fault at the {' or the '.join(places)}"] if places else []
    at += ["transient fault"] if "transient" in verdicts and not places else []
    return [*_frequent(rail.cause for rail in rails if rail.cause != "none"), *at]


def _frequent(words: Iterable[str]) -> list[str]:
    return [word for word, _ in Counter(words).most_common(NAMED)]


def _links(ends: list[_End], links: int) -> str:
    count = f"{len(ends)} of {links} links" if len(ends) < links else f"{links} links"
    count = "1 link" if links == 1 else count
    workers = named([end.worker.label for end in ends], "workers")
    return f"{count} of {workers} to {named([end.rail.peer for end in ends], 'peers')}"
