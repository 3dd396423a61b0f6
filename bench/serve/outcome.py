"""Outcome of a run from the clients' view: latencies, lost requests and wrong requests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from r2serve.bench.collectives.statistics import percentile
from r2serve.demo.report import first_difference
from r2serve.lab.serving.client import Request, Run

PERCENTS = (50, 95, 99)


@dataclass(frozen=True)
class Goal:
    """Limits for a good request, in ms: time to first token, and mean time per token.

    A good request also completes.
    """

    ttft_ms: float = 1000.0
    tpot_ms: float = 200.0


def ttft_ms(request: Request) -> float:
    """Returns the time from the request's due time to the first token, in ms."""
    return (request.times_ns[0] - request.sent_ns) / 1e6


def tpot_ms(request: Request) -> float | None:
    """Returns the mean time per token after the first token, in ms; None with a single token."""
    times = request.times_ns
    return (times[-1] - times[0]) / (len(times) - 1) / 1e6 if len(times) > 1 else None


def e2e_ms(request: Request) -> float:
    return (request.times_ns[-1] - request.sent_ns) / 1e6


def gaps_ms(request: Request) -> list[float]:
    """Returns the times between consecutive tokens, in ms."""
    times = request.times_ns
    return [(b - a) / 1e6 for a, b in itertools.pairwise(times)]


def differs(want: Request, got: Request) -> bool:
    """Whether a request got other tokens; an incomplete request is compared up to its end."""
    if not (want.token_ids or got.token_ids):
        return not (want.text.startswith(got.text) if not got.completed else want.text == got.text)
    mine = want.token_ids if got.completed else want.token_ids[: len(got.token_ids)]
    return first_difference(mine, got.token_ids) is not None


def wrong(reference: Run, run: Run) -> int:
    """Returns the number of requests with other tokens than in the reference run.

    The reference run has the same requests.
    """
    pairs = zip(reference.requests, run.requests, strict=True)
    return sum(differs(want, got) for want, got in pairs)


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """Returns percentiles by name; None without values."""
    if not values:
        return None
    return {f"p{percent}": round(percentile(values, percent), 3) for percent in PERCENTS}


def describe(run: Run, reference: Run | None, goal: Goal) -> dict[str, Any]:
    """Returns the measured part of a run's row; times are in ms, over completed requests."""
    done = [request for request in run.requests if request.completed and request.times_ns]
    per_token = [value for request in done if (value := tpot_ms(request)) is not None]
    sent = [request for request in run.requests if request.sent_ns]
    begun = min((request.sent_ns for request in sent), default=0)
    ended = max((request.times_ns[-1] for request in done), default=begun)
    good = sum(
        ttft_ms(request) <= goal.ttft_ms and (tpot_ms(request) or 0.0) <= goal.tpot_ms
        for request in done
    )
    seconds = (ended - begun) / 1e9
    return {
        "requests": {
            "sent": len(sent),
            "completed": run.completed,
            "failed": len(sent) - run.completed,
            "never_sent": len(run.requests) - len(sent),
            "wrong": None if reference is None else wrong(reference, run),
            "sent_again": sum(request.attempts > 1 for request in run.requests),
            "good": good,
        },
        "ttft_ms": summary([ttft_ms(request) for request in done]),
        "tpot_ms": summary(per_token),
        "itl_ms": summary([gap for request in done for gap in gaps_ms(request)]),
        "longest_gap_ms": max((gap for r in run.requests for gap in gaps_ms(r)), default=None),
        "e2e_ms": summary([e2e_ms(request) for request in done]),
        "samples": {
            "ttft_ms": [round(ttft_ms(request), 1) for request in done],
            "tpot_ms": [round(value, 2) for value in per_token],
            "e2e_ms": [round(e2e_ms(request), 1) for request in done],
        },
        "goodput_per_s": round(good / seconds, 3) if seconds > 0 else 0.0,
        "tokens_per_s": round(run.overall_tokens_per_second(), 1),
        "seconds": round(seconds, 2),
        "errors": sorted({request.error for request in run.requests if request.error})[:5],
    }
