"""Workloads: requests with send times, determined by a seed and equal for all contenders."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from r2serve.lab.serving.model import TinyLlama, vocabulary

# Estimated number of characters per token of text, used without a tokenizer.
CHARACTERS_PER_TOKEN = 4


class WorkloadError(ValueError):
    """Options or a file are invalid; the message names the field."""


@dataclass(frozen=True)
class Lengths:
    """Log-normal lengths in tokens: median, and sigma of the logarithm (0: all lengths equal)."""

    median: int
    sigma: float
    least: int = 1
    most: int = 4096

    def draw(self, source: random.Random) -> int:
        drawn = source.lognormvariate(math.log(self.median), self.sigma)
        return max(self.least, min(round(drawn), self.most))


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival.

    tokens: number of tokens of each request. arrivals_s: due time of each request, in s since the
    start; all 0 in a closed loop. concurrency: maximum number of requests under way; 0: an open
    loop, with independent arrivals.
    """

    prompts: tuple[str, ...]
    tokens: tuple[int, ...]
    arrivals_s: tuple[float, ...]
    concurrency: int = 0

    @property
    def seconds(self) -> float:
        """Due time of the last request, in s since the start."""
        return max(self.arrivals_s, default=0.0)


def synthetic(count: int, seed: int, prompt: Lengths, output: Lengths) -> list[tuple[str, int]]:
    """Returns prompts from the vocabulary of the demo's model, with numbers of output tokens."""
    source = random.Random(seed)
    words = vocabulary(TinyLlama())
    return [
        (" ".join(source.choices(words, k=prompt.draw(source))), output.draw(source))
        for _ in range(count)
    ]


def from_sharegpt(path: Path, count: int, seed: int, output: Lengths) -> list[tuple[str, int]]:
    """Draws the first turns of conversations from a file in ShareGPT's format.

    The format is a list of ``{"conversations": [{"from": …, "value": …}, …]}``. The number of
    output tokens is estimated from the characters of the answer, within the limits of ``output``.

    Raises:
        WorkloadError: the file is not in ShareGPT's format, or has no conversation with an answer.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WorkloadError(f"sharegpt: {path}: {error}") from error
    if not isinstance(entries, list):
        raise WorkloadError(f"sharegpt: {path}: must be a list of conversations")
    known = []
    for entry in entries:
        turns = entry.get("conversations", []) if isinstance(entry, dict) else []
        values = [turn.get("value", "") for turn in turns if isinstance(turn, dict)]
        if len(values) >= 2 and values[0].strip() and values[1].strip():
            asked = len(values[1]) // CHARACTERS_PER_TOKEN
            known.append((values[0], max(output.least, min(asked, output.most))))
    if not known:
        raise WorkloadError(f"sharegpt: {path}: no conversation with a question and an answer")
    source = random.Random(seed)
    source.shuffle(known)
    return list(itertools.islice(itertools.cycle(known), count))


def poisson(count: int, rate: float, seed: int) -> tuple[float, ...]:
    """Returns Poisson arrivals at ``rate`` per second, in s; the first arrival is at 0."""
    source = random.Random(seed)
    gaps = (source.expovariate(rate) for _ in range(count - 1))
    return tuple(itertools.accumulate(gaps, initial=0.0))


def arrange(
    requests: Sequence[tuple[str, int]], seed: int, *, rate: float = 0.0, concurrency: int = 0
) -> Workload:
    """Returns a workload: an open loop at ``rate`` per second, or a closed loop.

    Raises:
        WorkloadError: ``requests`` is empty, or ``rate`` and ``concurrency`` are not exclusive.
    """
    if not requests:
        raise WorkloadError("requests is 0: must be 1 or more")
    if (rate > 0) == (concurrency > 0):
        raise WorkloadError(
            f"rate is {rate:g} and concurrency is {concurrency}: exactly one must be above 0"
        )
    arrivals = poisson(len(requests), rate, seed) if rate > 0 else (0.0,) * len(requests)
    return Workload(
        tuple(text for text, _ in requests),
        tuple(tokens for _, tokens in requests),
        arrivals,
        concurrency,
    )
