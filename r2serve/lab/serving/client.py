"""Runs the load generator (load.py) inside a place, follows the progress, reads the result."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r2serve.lab.serving.places import Place

_LOAD = Path(__file__).with_name("load.py")
# Requests must not go through a proxy.
_ENVIRONMENT_WITHOUT_PROXY = ("http_proxy", "https_proxy", "all_proxy")


class LoadError(RuntimeError):
    """The load process failed, or made no progress within the allowed time."""


@dataclass(frozen=True)
class Request:
    """Outcome of a request.

    times_ns: arrival of each token, CLOCK_MONOTONIC. sent_ns: time of sending, CLOCK_MONOTONIC.
    prompt: index of the prompt. token_ids: empty if the server sends no ids. id: the server's
    request id. attempts: number of sendings; times and tokens are from the last attempt.
    """

    token_ids: tuple[int, ...]
    times_ns: tuple[int, ...]
    error: str
    finished: bool
    prompt: int = 0
    sent_ns: int = 0
    text: str = ""
    id: str = ""
    attempts: int = 1

    @property
    def completed(self) -> bool:
        return self.finished and not self.error


@dataclass(frozen=True)
class Run:
    """All requests of a run."""

    requests: tuple[Request, ...]

    @property
    def completed(self) -> int:
        return sum(request.completed for request in self.requests)

    @property
    def failed(self) -> int:
        return len(self.requests) - self.completed

    @property
    def tokens(self) -> int:
        return sum(len(request.token_ids) for request in self.requests)

    def tokens_per_second(self, begin_ns: int, end_ns: int) -> float:
        """Returns the token rate of all requests in [begin_ns, end_ns), tokens/s."""
        if end_ns <= begin_ns:
            return 0.0
        count = sum(
            begin_ns <= time_ns < end_ns
            for request in self.requests
            for time_ns in request.times_ns
        )
        return count * 1e9 / (end_ns - begin_ns)

    def overall_tokens_per_second(self) -> float:
        times = [time_ns for request in self.requests for time_ns in request.times_ns]
        return self.tokens_per_second(min(times), max(times) + 1) if times else 0.0

    def longest_gap_ms(self, begin_ns: int, end_ns: int) -> float | None:
        """Returns the longest time between two tokens of a request that overlaps the time span.

        None without two such tokens.
        """
        gaps = [
            (b - a) / 1e6
            for request in self.requests
            for a, b in itertools.pairwise(request.times_ns)
            if b > begin_ns and a < end_ns
        ]
        return max(gaps, default=None)

    def step_ms(self, begin_ns: int = 0, end_ns: int = 2**63) -> float:
        """Returns the median decode step for tokens in [begin_ns, end_ns), ms; 0 = unknown."""
        gaps = []
        for request in self.requests:
            times = [time_ns for time_ns in request.times_ns if begin_ns <= time_ns < end_ns]
            # Average over 8 steps: the client's event loop quantises single arrivals.
            gaps += [(b - a) / 8 for a, b in zip(times, times[8:], strict=False)]
        return statistics.median(gaps) / 1e6 if gaps else 0.0


def _parse(data: dict[str, Any]) -> Run:
    return Run(
        tuple(
            Request(
                token_ids=tuple(item["token_ids"]),
                times_ns=tuple(item["times_ns"]),
                error=item["error"],
                finished=item["finished"],
                prompt=item["prompt"],
                sent_ns=item["sent_ns"],
                text=item["text"],
                id=item["id"],
                attempts=item["attempts"],
            )
            for item in data["requests"]
        )
    )


def _start(place: Place, order: dict[str, Any], stdout: int) -> subprocess.Popen[bytes]:
    env = {k: v for k, v in os.environ.items() if k.lower() not in _ENVIRONMENT_WITHOUT_PROXY}
    process = place.popen(
        [sys.executable, "-P", str(_LOAD)], env=env, stdin=subprocess.PIPE, stdout=stdout
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(order).encode() + b"\n")
    process.stdin.flush()
    return process


def wait_until_healthy(place: Place, url: str, timeout_s: float) -> subprocess.Popen[bytes]:
    """Starts a process with exit status 0 once the server answers, or 1 after timeout_s."""
    order = {"mode": "wait", "url": url, "timeout_s": timeout_s}
    process = _start(place, order, stdout=subprocess.DEVNULL)
    _close_input(process)
    return process


def _close_input(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the process has already ended
        process.stdin.close()


@dataclass(frozen=True)
class Turns:
    """Time windows in which a load may begin requests.

    begin_ns, until_ns: overall range, CLOCK_MONOTONIC in ns. The range is divided into periods of
    ``period_ns``; requests begin only between offsets ``first_ns`` and ``last_ns`` of a period.
    """

    begin_ns: int
    until_ns: int
    period_ns: int
    first_ns: int
    last_ns: int


class Load:
    """A run in progress.

    max_tokens: per request, or a value per prompt. streams: None sends a request per prompt, all at
    once; a number keeps as many requests in flight, with rotating prompts, until drain().
    arrivals_s: due time of each prompt's request since the start, s; `streams` then limits the
    requests in flight. turns: with streams, the windows to begin requests. extra, retry: see
    load.py.
    """

    def __init__(
        self,
        place: Place,
        url: str,
        prompts: Sequence[str],
        max_tokens: int | Sequence[int],
        result: Path,
        streams: int | None = None,
        *,
        model: str = "tiny-llama",
        arrivals_s: Sequence[float] | None = None,
        extra: Mapping[str, Any] | None = None,
        retry: bool = False,
        turns: Turns | None = None,
    ) -> None:
        self._result = result
        limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
        self.streams = len(prompts) if streams is None else streams
        self.expected_requests = len(prompts)
        self._timed = arrivals_s is not None or turns is not None
        self.expected_tokens = sum(limits)
        self.tokens = 0
        self.finished = 0
        self.begun_ns = 0  # origin of arrivals_s, CLOCK_MONOTONIC; 0 = not started
        self.changed_at = time.monotonic()
        order: dict[str, Any] = {
            "mode": "stream" if streams is None else "loop",
            "url": url,
            "model": model,
            "prompts": list(prompts),
            "max_tokens": limits,
            "streams": self.streams,
            "result": str(result),
            "retry": retry,
        }
        if arrivals_s is not None:
            order |= {"mode": "timed", "arrivals_s": list(arrivals_s), "streams": streams or 0}
        if turns is not None:
            order |= {"mode": "turns", "turn_ns": [turns.first_ns, turns.last_ns]}
            order |= {name: getattr(turns, name) for name in ("begin_ns", "until_ns", "period_ns")}
        if extra is not None:
            order["extra"] = dict(extra)
        self._process = _start(place, order, stdout=subprocess.PIPE)
        self._reader = threading.Thread(target=self._follow, name="demo-load", daemon=True)
        self._reader.start()

    def _follow(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            for line in pipe:
                said = json.loads(line)
                if "begun_ns" in said:
                    self.begun_ns = int(said["begun_ns"])
                    continue
                self.finished, tokens = int(said["finished"]), int(said["tokens"])
                # A timed load may be idle between requests; other loads are never idle.
                idle = self._timed and not said["streaming"]
                if tokens != self.tokens or idle:
                    self.tokens, self.changed_at = tokens, time.monotonic()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def silent_s(self) -> float:
        """Time since the last token, s; idle times of a timed load do not count."""
        return time.monotonic() - self.changed_at

    def wait_for_tokens(self, count: int, patience_s: float) -> None:
        """Waits for `count` tokens; raises LoadError after patience_s without a token."""
        while self.running and self.tokens < count:
            if self.silent_s > patience_s:
                raise LoadError(f"no token for {patience_s:.0f} s")
            time.sleep(0.02)

    def finish(self, patience_s: float, watch: Callable[[], None]) -> Run:
        """Waits for the end of the run, and calls `watch` every 0.1 s.

        After patience_s without a token, the run is stopped and unfinished requests count as
        failed. Raises LoadError if the load process fails.
        """
        while self.running:
            watch()
            if self.silent_s > patience_s:
                self.stop()
                break
            time.sleep(0.1)
        return self.result(timeout_s=10)

    def drain(self) -> None:
        """Stops new requests; the run ends after the requests in flight."""
        _close_input(self._process)

    def stop(self) -> None:
        """Ends the run at once; unfinished requests count as failed."""
        self._process.terminate()

    def result(self, timeout_s: float) -> Run:
        """Waits for the result; raises LoadError after timeout_s or if the process failed."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise LoadError(f"the run did not end within {timeout_s:.0f} s") from error
        self._reader.join()
        _close_input(self._process)
        if status != 0:
            raise LoadError(f"the load process ended with status {status}")
        return _parse(json.loads(self._result.read_text(encoding="utf-8")))
