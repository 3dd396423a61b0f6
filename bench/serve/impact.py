"""What the sidecar says a request waited, beside what its client saw."""

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
SETTLED_S = 1.0
PATIENCE_S = 30.0
ASKED_S = 10.0
PAGE = 1000
_SIDECAR = "from r2serve.cli import main; main()"


class ImpactError(RuntimeError):
    """The sidecar did not answer; says why."""


@dataclass(frozen=True)
class Impact:
    """Of one request, in ms: what it waited for rail events, and by how much its tokens were late.

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
    """As the sidecar has it: all that a request waited, and when the steps ended that waited."""

    stall_ms: float
    ended_ns: tuple[int, ...]  # CLOCK_MONOTONIC


def ask(folder: Path, log: Path) -> dict[str, Held]:
    """A sidecar over a node's journals: the requests that waited, by the engine's names of them.

    Raises ImpactError where none can be had.
    """
    with _sidecar(folder, log) as url:
        found = _settled(url)
        offset_ns = time.time_ns() - time.monotonic_ns()
        held = {}
        for name, stall_s in found.items():
            steps = _get(f"{url}/v1/requests/{name}/impact")["steps"]
            ended = (datetime.fromisoformat(step["ended"]).timestamp() for step in steps)
            held[name] = Held(stall_s * 1e3, tuple(int(at * 1e9) - offset_ns for at in ended))
        return held


def compare(held: Mapping[str, Held], run: Run, reference: Run) -> list[Impact]:
    """The requests of a run that waited; ``reference`` is of the same requests, undisturbed."""
    found = []
    for index, (request, undisturbed) in enumerate(
        zip(run.requests, reference.requests, strict=True)
    ):
        # vLLM numbers the prompts of a completion.
        waited = held.get(f"{request.id}-0") or held.get(request.id)
        if request.id and request.times_ns and waited is not None:
            late_ms = _late_ms(request, undisturbed, waited.ended_ns)
            found.append(Impact(index, round(waited.stall_ms, 3), round(late_ms, 3)))
    return found


def _late_ms(request: Request, undisturbed: Request, ended_ns: Sequence[int]) -> float:
    """How much longer than usual the client waited for the tokens of the steps that waited.

    A step's token comes after its end. Usual are the median gap of the same request undisturbed,
    and the time to its first token.
    """
    usual = [b - a for a, b in itertools.pairwise(undisturbed.times_ns)]
    arrivals = (request.sent_ns, *request.times_ns)
    late = 0.0
    for index, (before, after) in enumerate(zip(arrivals, request.times_ns, strict=False)):
        if any(before < ended <= after for ended in ended_ns):
            first = undisturbed.times_ns[0] - undisturbed.sent_ns
            expected = statistics.median(usual) if index and usual else first
            late += after - before - expected
    return late / 1e6


def jitter_ms(undisturbed: Run) -> float | None:
    """By how much gaps differ from the median gap of their request, where nothing is struck.

    19 of 20 differ by less; None: nothing has two gaps. An agreement to less than that of a single
    stall is luck.
    """
    apart = []
    for request in undisturbed.requests:
        gaps = [(b - a) / 1e6 for a, b in itertools.pairwise(request.times_ns)]
        usual = statistics.median(gaps) if gaps else 0.0
        apart += [abs(gap - usual) for gap in gaps]
    return round(sorted(apart)[int(0.95 * len(apart))], 3) if len(apart) > 1 else None


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
    """What each request waited in s, when it has been the same for a while."""
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
        found |= {each["id"]: each["stall_s"] for each in page["requests"]}
        if not page["next"]:
            return found
        before = f"&before={page['next']}"


def _get(url: str) -> Any:
    try:
        with urllib.request.urlopen(url, timeout=ASKED_S) as answer:
            return json.load(answer)
    except (OSError, ValueError) as error:
        raise ImpactError(f"{url}: {error}") from error
