"""The baseline: the engine's stock communicator with the same load and the same first fault."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from r2serve.demo.report import BaselineReport
from r2serve.lab.background import BackgroundPlay
from r2serve.lab.injector import LabInjector
from r2serve.lab.lab import Lab
from r2serve.lab.player import Player
from r2serve.lab.schedule import Fault
from r2serve.lab.serving.client import Load
from r2serve.lab.serving.places import Place
from r2serve.lab.serving.plan import MAX_MODEL_LEN, Plan
from r2serve.lab.serving.progress import Progress
from r2serve.lab.serving.serve import STEP_TOKENS, Server

MEASURE_S = 5.0
# A step takes tens of ms; a longer pause than this counts as a freeze, even on a busy machine.
FREEZE_S = 2.0
WARM_UP_TOKENS = 96
FIRST_TOKENS_TIMEOUT_S = 30.0


def measure(
    plan: Plan,
    lab: Lab,
    places: Sequence[Place],
    texts: Sequence[str],
    watch_s: float,
    progress: Progress,
) -> BaselineReport:
    """Serves with the stock communicator; measures a step; fails gloo's rail; watches watch_s s."""
    with Server(plan, places) as server:
        with progress.step(f"baseline: starting {plan.engine} serve with its stock communicator"):
            server.wait_until_ready(lambda seconds: progress.detail(f"{seconds:.0f} s"))
        with progress.step("baseline: warming up"):
            server.stream(texts, WARM_UP_TOKENS, "warm-up", progress.detail)
            one = server.stream(texts[:1], STEP_TOKENS, "one-stream", progress.detail)
        # Enough tokens for the run to last beyond the fault.
        tokens = MAX_MODEL_LEN - 256
        load = Load(server.client, server.url, texts, tokens, plan.work / "stock-run.json")
        with progress.step("baseline: streaming without faults"):
            _wait_for_first_tokens(server, load)
            time.sleep(MEASURE_S)
        with progress.step(f"baseline: carrier of its rail lost, watching for {watch_s:.0f} s"):
            cut = Fault(at_s=0.0, kind="carrier_loss", node=0, rail=0, duration_s=math.inf)
            cut_ns = time.monotonic_ns()
            with BackgroundPlay(Player([cut], LabInjector(lab))):
                frozen_s = _watch(load, watch_s, progress)
            load.stop()
            run = load.result(timeout_s=10)
    begin_ns = cut_ns - int(MEASURE_S * 1e9)
    return BaselineReport(
        decode_step_ms=one.step_ms(),
        tokens_per_s=run.tokens_per_second(begin_ns, cut_ns),
        frozen_s=frozen_s,
        watched_s=watch_s,
        sent=len(run.requests),
        unfinished=run.failed,
    )


def _wait_for_first_tokens(server: Server, load: Load) -> None:
    deadline = time.monotonic() + FIRST_TOKENS_TIMEOUT_S
    while load.tokens < load.streams * 16 and time.monotonic() < deadline:
        server.check_alive()
        time.sleep(0.1)


def _watch(load: Load, watch_s: float, progress: Progress) -> float | None:
    """Returns the time without tokens at the end of the watch, s; None if tokens still arrive."""
    begun = time.monotonic()
    while time.monotonic() - begun < watch_s and load.running:
        progress.detail(f"no token for {load.silent_s:.0f} s")
        time.sleep(0.1)
    return load.silent_s if load.silent_s > FREEZE_S else None
