"""What the sidecar says rail events cost a request, beside what its client saw."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from r2serve.bench.serve import rounds
from r2serve.bench.serve.rounds import Round
from r2serve.lab.serving.client import Request, Run
from r2serve.lab.serving.places import free_port

AGREE_MS = 5.0
AGREE_PART = 0.05
ON_ITS_WAY_NS = 5_000_000
"""A token comes to the client sooner than that after the next step began, or it was held up."""
SETTLED_S = 1.0
PATIENCE_S = 30.0
ASKED_S = 10.0
PAGE = 1000
_SIDECAR = "from r2serve.cli import main; main()"


class ImpactError(RuntimeError):
    """The sidecar did not answer; says why."""


@dataclass(frozen=True)
class Impact:
    """Of one request, in ms: what rail events cost it, and by how much its tokens were late.

    request: its index in the workload.
    """

    request: int
    sidecar_ms: float
    client_ms: float

    @property
    def agrees(self) -> bool:
        """To 5 ms or 5 %, whichever is more."""
        apart = abs(self.sidecar_ms - self.client_ms)
        return apart <= max(AGREE_MS, AGREE_PART * self.sidecar_ms)


@dataclass(frozen=True)
class Held:
    """As the sidecar has it: what rail events cost a request in all, and in which steps.

    spans_ns: from when a step that waited began until it ended, CLOCK_MONOTONIC.
    """

    late_ms: float
    spans_ns: tuple[tuple[int, int], ...]
    whole: bool = True
    """These are all: of a request that was held up often, the sidecar keeps the last ones."""


def ask(folder: Path, log: Path) -> dict[str, Held]:
    """A sidecar over a node's journals: the requests that waited, by the engine's names of them.

    Raises ImpactError where none can be had.
    """
    with _sidecar(folder, log) as url:
        found = _settled(url)
        offset_ns = time.time_ns() - time.monotonic_ns()
        held = {}
        for name, late_s in found.items():
            told = _get(f"{url}/v1/requests/{name}/impact")
            steps = told["steps"]
            spans = tuple(
                (_clock_ns(step["began"]) - offset_ns, _clock_ns(step["ended"]) - offset_ns)
                for step in steps
            )
            held[name] = Held(late_s * 1e3, spans, told["held_steps"] == len(steps))
        return held


def compare(held: Mapping[str, Held], run: Run, reference: Run) -> list[Impact]:
    """The requests of a run that waited, as far as all their waits are known one by one.

    reference: a run of the same requests, undisturbed.
    """
    found = rounds.rounds(run)
    waited = {
        index: mine
        for index, request in enumerate(run.requests)
        if request.times_ns and (mine := _held_of(request, held)) is not None
    }
    spans_ns = {span for mine in waited.values() for span in mine.spans_ns}
    struck = {span: _struck(found, span) for span in spans_ns}
    usual = rounds.RoundBaseline(
        found, frozenset(itertools.chain(*struck.values())), rounds.rounds(reference)
    )
    impacts = []
    for index, mine in waited.items():
        if not mine.whole:
            continue
        late_ns = 0.0
        places = {place for span in mine.spans_ns for place in struck[span]}
        for stretch in _stretches(places, found, usual):
            # Who came meanwhile would have had to wait for the end as well, though less long.
            waited_ns = found[stretch[-1]].came_ns - run.requests[index].sent_ns
            late_ns += min(max(0.0, sum(map(usual.late_ns, stretch))), waited_ns)
        impacts.append(Impact(index, round(mine.late_ms, 3), round(late_ns / 1e6, 3)))
    return impacts


def partly_known(held: Mapping[str, Held], run: Run) -> int:
    """How many requests of a run waited more often than is known one by one."""
    of_run = (_held_of(request, held) for request in run.requests)
    return sum(mine is not None and not mine.whole for mine in of_run)


def _held_of(request: Request, held: Mapping[str, Held]) -> Held | None:
    # vLLM numbers the prompts of a completion.
    return (held.get(f"{request.id}-0") or held.get(request.id)) if request.id else None


def _struck(found: Sequence[Round], span_ns: tuple[int, int]) -> range:
    """The rounds that a wait held up, by their indices: up to the first one after its end.

    The one before may be late, too, by the wait or something else: it was on its way when the step
    began. What was lost by then is not lost by the step.
    """
    began, ended = span_ns
    first = bisect_right(found, began + ON_ITS_WAY_NS, key=lambda each: each.came_ns)
    last = bisect_left(found, ended, key=lambda each: each.came_ns)
    return range(min(first, last), min(last + 1, len(found)))


def _stretches(
    places: Collection[int], found: Sequence[Round], usual: rounds.RoundBaseline
) -> list[list[int]]:
    """Rounds without a gap between them, with the one behind them that came far too soon.

    What something else held up on its way to the clients comes all together after that. One round
    only: steps of an engine may be short by themselves.
    """
    stretches: list[list[int]] = []
    for place in sorted(places):
        if not stretches or stretches[-1][-1] + 1 < place:
            stretches.append([])
        stretches[-1].append(place)
        after = place + 1
        if after < len(found) and after not in places and usual.catches_up(after):
            stretches[-1].append(after)
    return stretches


def _clock_ns(said: str) -> int:
    return int(datetime.fromisoformat(said).timestamp() * 1e9)


@contextlib.contextmanager
def _sidecar(folder: Path, log: Path) -> Iterator[str]:
    port = free_port("127.0.0.1")
    command = [sys.executable, "-c", _SIDECAR, "sidecar", "--port", str(port)]
    command += ["--journal-dir", str(folder)]
    with log.open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                _get(f"{url}/v1/requests?limit=1")
                break
            except ImpactError as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    text = log.read_text(encoding="utf-8", errors="replace").strip()
                    last = text.splitlines()[-1] if text else str(error)
                    raise ImpactError(f"the sidecar does not answer: {last}") from error
                time.sleep(0.05)
        yield url
    finally:
        process.kill()
        process.wait()


def _settled(url: str) -> dict[str, float]:
    """What each request is late by in s, when it has been the same for a while."""
    deadline = time.monotonic() + PATIENCE_S
    found, since = _all(url), time.monotonic()
    while time.monotonic() < min(since + SETTLED_S, deadline):
        time.sleep(0.1)
        again = _all(url)
        if again != found:
            found, since = again, time.monotonic()
    return found


def _all(url: str) -> dict[str, float]:
    found: dict[str, float] = {}
    before = ""
    while True:
        page = _get(f"{url}/v1/requests?waited=true&limit={PAGE}{before}")
        found |= {each["id"]: each["late_s"] for each in page["requests"]}
        if not page["next"]:
            return found
        before = f"&before={page['next']}"


def _get(url: str) -> Any:
    try:
        with urllib.request.urlopen(url, timeout=ASKED_S) as answer:
            return json.load(answer)
    except (OSError, ValueError) as error:
        raise ImpactError(f"{url}: {error}") from error
