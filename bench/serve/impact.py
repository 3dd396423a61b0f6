"""What the sidecar says rail events cost a request, beside what its client saw."""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from r2serve.demo.client import Request, Run
from r2serve.demo.places import free_port

AGREE_MS = 5.0
AGREE_PART = 0.05
AROUND = 8
"""So many gaps before and after one tell what is usual there."""
ON_ITS_WAY_NS = 5_000_000
"""A token that comes to the client so much later than a stall began may have been held up by it."""
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

    spans_ns: from when a step began to wait until it ended, CLOCK_MONOTONIC.
    """

    late_ms: float
    spans_ns: tuple[tuple[int, int], ...]


def ask(folder: Path, log: Path) -> dict[str, Held]:
    """A sidecar over a node's journals: the requests that waited, by the engine's names of them.

    Raises ImpactError where none can be had.
    """
    with _sidecar(folder, log) as url:
        found = _settled(url)
        offset_ns = time.time_ns() - time.monotonic_ns()
        held = {}
        for name, late_s in found.items():
            steps = _get(f"{url}/v1/requests/{name}/impact")["steps"]
            spans = tuple(
                (
                    min(_clock_ns(stall["began"]) for stall in step["stalls"]) - offset_ns,
                    _clock_ns(step["ended"]) - offset_ns,
                )
                for step in steps
            )
            held[name] = Held(late_s * 1e3, spans)
        return held


def compare(held: Mapping[str, Held], run: Run, reference: Run) -> list[Impact]:
    """The requests of a run that waited; ``reference`` is of the same requests, undisturbed."""
    firsts = {
        index: request.times_ns[0] - request.sent_ns
        for index, request in enumerate(run.requests)
        if request.times_ns and _held_of(request, held) is None
    }
    found = []
    for index, (request, undisturbed) in enumerate(
        zip(run.requests, reference.requests, strict=True)
    ):
        waited = _held_of(request, held)
        if request.times_ns and waited is not None:
            near = [firsts[i] for i in _around(index, len(run.requests)) if i in firsts]
            first = near or [undisturbed.times_ns[0] - undisturbed.sent_ns]
            late_ms = _late_ms(request, undisturbed, waited.spans_ns, statistics.median(first))
            found.append(Impact(index, round(waited.late_ms, 3), round(late_ms, 3)))
    return found


def _held_of(request: Request, held: Mapping[str, Held]) -> Held | None:
    # vLLM numbers the prompts of a completion.
    return (held.get(f"{request.id}-0") or held.get(request.id)) if request.id else None


def _late_ms(
    request: Request, undisturbed: Request, spans_ns: Sequence[tuple[int, int]], first_ns: float
) -> float:
    """How much longer than usual the client waited for the tokens of the steps that waited.

    A step's token comes after its end. The token before may be late by the same wait: it was on its
    way when that began. Usual is what the gaps around are, as the batch is nearly the same there;
    for a first token first_ns, what those of the requests around took that did not wait.
    """
    waits = list(itertools.pairwise((request.sent_ns, *request.times_ns)))
    held = {
        index
        for index, (before, after) in enumerate(waits)
        if any(
            before < ended and (ended <= after or began + ON_ITS_WAY_NS < after)
            for began, ended in spans_ns
        )
    }
    gaps = [after - before for before, after in waits]
    late = 0.0
    for index in held:
        near = [gaps[i] for i in _around(index, len(gaps)) if i > 0 and i not in held]
        if index == 0:
            usual = first_ns
        elif near:
            usual = statistics.median(near)
        else:  # all gaps around it waited, too
            others = [b - a for a, b in itertools.pairwise(undisturbed.times_ns)]
            usual = statistics.median(others or [0])
        late += gaps[index] - usual
    return late / 1e6


def _clock_ns(said: str) -> int:
    return int(datetime.fromisoformat(said).timestamp() * 1e9)


def _around(index: int, many: int) -> Iterator[int]:
    """The indices of up to AROUND others on either side."""
    for near in range(max(0, index - AROUND), min(many, index + AROUND + 1)):
        if near != index:
            yield near


def jitter_ms(undisturbed: Run) -> float | None:
    """By how much a gap differs from those around it, where nothing is struck.

    19 of 20 differ by less; None: there are too few. An agreement to less than that of a single
    stall is luck.
    """
    apart = []
    for request in undisturbed.requests:
        gaps = [(b - a) / 1e6 for a, b in itertools.pairwise(request.times_ns)]
        for index, gap in enumerate(gaps):
            if near := [gaps[i] for i in _around(index, len(gaps))]:
                apart.append(abs(gap - statistics.median(near)))
    return round(sorted(apart)[int(0.95 * len(apart))], 3) if apart else None


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
