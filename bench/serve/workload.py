"""Which requests are sent, and when: the same for everybody who serves them, from a seed."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from r2serve.lab.serving.model import TinyLlama, vocabulary

# Text has about so many characters a token, where there is no tokenizer to ask.
CHARACTERS_PER_TOKEN = 4


class WorkloadError(ValueError):
    """Options or a file that make no workload; names the field."""


@dataclass(frozen=True)
class Lengths:
    """Log-normal lengths in tokens: their median, and sigma of their logarithm (0: all alike)."""

    median: int
    sigma: float
    least: int = 1
    most: int = 4096

    def draw(self, source: random.Random) -> int:
        drawn = source.lognormvariate(math.log(self.median), self.sigma)
        return max(self.least, min(round(drawn), self.most))


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrivals.

    tokens: how many each asks for. arrivals_s: when each is due, in s since the start; all 0 with a
    closed loop. concurrency: at most so many are under way; 0: an open loop, in which nobody waits
    for anybody.
    """

    prompts: tuple[str, ...]
    tokens: tuple[int, ...]
    arrivals_s: tuple[float, ...]
    concurrency: int = 0

    @property
    def seconds(self) -> float:
        """When the last request is due."""
        return max(self.arrivals_s, default=0.0)


def synthetic(count: int, seed: int, prompt: Lengths, output: Lengths) -> list[tuple[str, int]]:
    """Prompts of words that the demo's model knows, and the tokens asked for."""
    source = random.Random(seed)
    words = vocabulary(TinyLlama())
    return [
        (" ".join(source.choices(words, k=prompt.draw(source))), output.draw(source))
        for _ in range(count)
    ]


def from_sharegpt(path: Path, count: int, seed: int, output: Lengths) -> list[tuple[str, int]]:
    """First turns of conversations, drawn from a file in ShareGPT's format.

    That is a list of ``{"conversations": [{"from": …, "value": …}, …]}``. The tokens asked for are
    those of the answer there, by its characters, within the limits of ``output``.

    Raises:
        WorkloadError: it is no such file, or has no conversation with an answer.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WorkloadError(f"sharegpt: {path}: {error}") from error
    if not isinstance(entries, list):
        raise WorkloadError(f"sharegpt: {path}: a list of conversations is expected")
    known = []
    for entry in entries:
        turns = entry.get("conversations", []) if isinstance(entry, dict) else []
        values = [turn.get("value", "") for turn in turns if isinstance(turn, dict)]
        if len(values) >= 2 and values[0].strip() and values[1].strip():
            asked = len(values[1]) // CHARACTERS_PER_TOKEN
            known.append((values[0], max(output.least, min(asked, output.most))))
    if not known:
        raise WorkloadError(f"sharegpt: {path}: no conversation has a question and an answer")
    source = random.Random(seed)
    source.shuffle(known)
    return list(itertools.islice(itertools.cycle(known), count))


def poisson(count: int, rate: float, seed: int) -> tuple[float, ...]:
    """Arrivals at ``rate`` a second, in s; the first one at 0."""
    source = random.Random(seed)
    gaps = (source.expovariate(rate) for _ in range(count - 1))
    return tuple(itertools.accumulate(gaps, initial=0.0))


def arrange(
    requests: Sequence[tuple[str, int]], seed: int, *, rate: float = 0.0, concurrency: int = 0
) -> Workload:
    """Requests with arrivals: an open loop at ``rate`` a second, or a closed one.

    Raises:
        WorkloadError: there are no requests, or not exactly one of both is given.
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
