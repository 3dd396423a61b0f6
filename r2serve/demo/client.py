"""Runs the load (load.py) inside a place, follows it while it runs, and reads its result."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r2serve.demo.places import Place

_LOAD = Path(__file__).with_name("load.py")
# vLLM and this process share few cores; the client must not be what slows decoding.
_ENVIRONMENT_WITHOUT_PROXY = ("http_proxy", "https_proxy", "all_proxy")


class LoadError(RuntimeError):
    """The load process itself failed."""


@dataclass(frozen=True)
class Request:
    """One request's outcome. times_ns: CLOCK_MONOTONIC of each token's arrival."""

    token_ids: tuple[int, ...]
    times_ns: tuple[int, ...]
    error: str
    finished: bool


@dataclass(frozen=True)
class Run:
    """All requests of one run."""

    requests: tuple[Request, ...]

    @property
    def completed(self) -> int:
        return sum(request.finished and not request.error for request in self.requests)

    @property
    def failed(self) -> int:
        return len(self.requests) - self.completed

    @property
    def tokens(self) -> int:
        return sum(len(request.token_ids) for request in self.requests)

    def tokens_per_second(self, begin_ns: int, end_ns: int) -> float:
        """Tokens of all requests that came in [begin_ns, end_ns), a second."""
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

    def step_ms(self, begin_ns: int = 0, end_ns: int = 2**63) -> float:
        """Median decode step in ms, of tokens that came in [begin_ns, end_ns); 0 if unknown."""
        gaps = []
        for request in self.requests:
            times = [time_ns for time_ns in request.times_ns if begin_ns <= time_ns < end_ns]
            # The median over 8 steps: one step's arrivals are quantised by the client's own turns.
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
    with process.stdin as pipe:
        pipe.write(json.dumps(order).encode() + b"\n")
    return process


def wait_until_healthy(place: Place, url: str, timeout_s: float) -> subprocess.Popen[bytes]:
    """A process that exits with 0 once the server answers, with 1 after timeout_s."""
    return _start(
        place, {"mode": "wait", "url": url, "timeout_s": timeout_s}, stdout=subprocess.DEVNULL
    )


class Load:
    """A run under way."""

    def __init__(
        self, place: Place, url: str, prompts: Sequence[str], max_tokens: int, result: Path
    ) -> None:
        self._result = result
        self.streams = len(prompts)
        self.expected_tokens = len(prompts) * max_tokens
        self.tokens = 0
        self.changed_at = time.monotonic()
        order = {
            "mode": "stream",
            "url": url,
            "model": "tiny-llama",
            "prompts": list(prompts),
            "max_tokens": max_tokens,
            "result": str(result),
        }
        self._process = _start(place, order, stdout=subprocess.PIPE)
        self._reader = threading.Thread(target=self._follow, name="demo-load", daemon=True)
        self._reader.start()

    def _follow(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            for line in pipe:
                tokens = int(json.loads(line)["tokens"])
                if tokens != self.tokens:
                    self.tokens, self.changed_at = tokens, time.monotonic()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def silent_s(self) -> float:
        """Time since the last token came."""
        return time.monotonic() - self.changed_at

    def stop(self) -> None:
        """Ends the run; what has not finished counts as failed."""
        self._process.terminate()

    def result(self, timeout_s: float) -> Run:
        """Waits for the end of the run. Raises LoadError after timeout_s or when it broke."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise LoadError(f"the run did not end within {timeout_s:.0f} s") from error
        self._reader.join()
        if status != 0:
            raise LoadError(f"the load process ended with status {status}")
        return _parse(json.loads(self._result.read_text(encoding="utf-8")))
