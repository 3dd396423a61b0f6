"""Compares the delay of each request reported by the sidecar with the delay seen by the client."""

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
"""Time for tokens of the previous step to reach the clients, from the stalled step's begin on."""
SETTLED_S = 1.0
PATIENCE_S = 30.0
ASKED_S = 10.0
PAGE = 1000
_SIDECAR = "from r2serve.cli import main; main()"


class ImpactError(RuntimeError):
    """The sidecar did not answer; the message gives the reason."""


@dataclass(frozen=True)
class Impact:
    """Delay of a request by rail events, in ms: the sidecar's figure and the client's figure.

    request: index of the request in the workload.
    """

    request: int
    sidecar_ms: float
    client_ms: float

    @property
    def agrees(self) -> bool:
        """Whether both figures agree to 5 ms or 5 %, whichever is more."""
        apart = abs(self.sidecar_ms - self.client_ms)
        return apart <= max(AGREE_MS, AGREE_PART * self.sidecar_ms)


@dataclass(frozen=True)
class Held:
    """The sidecar's record of a request: total delay by rail events, and the stalled steps.

    spans_ns: begin and end of each stalled step, CLOCK_MONOTONIC.
    """

    late_ms: float
    spans_ns: tuple[tuple[int, int], ...]
    whole: bool = True
    """Whether ``spans_ns`` is complete; the sidecar keeps only the last stalled steps."""


def ask(folder: Path, log: Path) -> dict[str, Held]:
    """Starts a sidecar over a node's journals; returns the stalled requests by engine request id.

    Raises ImpactError when the sidecar does not start or answer.
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
    """Compares both figures for the stalled requests with a complete list of stalled steps.

    reference: an undisturbed run of the same requests.
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
            # A request sent during the stall waits only from the request's own arrival.
            waited_ns = found[stretch[-1]].came_ns - run.requests[index].sent_ns
            late_ns += min(max(0.0, sum(map(usual.late_ns, stretch))), waited_ns)
        impacts.append(Impact(index, round(mine.late_ms, 3), round(late_ns / 1e6, 3)))
    return impacts


def partly_known(held: Mapping[str, Held], run: Run) -> int:
    """Returns the number of stalled requests with an incomplete list of stalled steps."""
    of_run = (_held_of(request, held) for request in run.requests)
    return sum(mine is not None and not mine.whole for mine in of_run)


def _held_of(request: Request, held: Mapping[str, Held]) -> Held | None:
    return held.get(request.id) if request.id else None


def _struck(found: Sequence[Round], span_ns: tuple[int, int]) -> range:
    """Returns the indices of the rounds delayed by a stalled step.

    The range ends with the first round after the end of the step. A round already on its way when
    the step began is not in the range: a delay of this round has another cause.
    """
    began, ended = span_ns
    first = bisect_right(found, began + ON_ITS_WAY_NS, key=lambda each: each.came_ns)
    last = bisect_left(found, ended, key=lambda each: each.came_ns)
    return range(min(first, last), min(last + 1, len(found)))


def _stretches(
    places: Collection[int], found: Sequence[Round], usual: rounds.RoundBaseline
) -> list[list[int]]:
    """Groups consecutive rounds, each group with the next round if the next round came too soon.

    Tokens delayed on the way to the clients arrive together with later tokens; the next round is
    then much too short. Only a single round is added, because steps of an engine can be short.
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
    """Returns the delay of each request in s, once unchanged for SETTLED_S."""
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
