"""Serves a tiny model over two lab nodes through a compressed hour of faults."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from r2serve.demo.hour.report import HourReport
from r2serve.demo.hour.stalls import EventLog
from r2serve.lab import lab as labs
from r2serve.lab.holder import LabUnavailableError
from r2serve.lab.injector import LabInjector
from r2serve.lab.lab import Lab
from r2serve.lab.player import Player
from r2serve.lab.schedule import HOUR_S, Schedule, compressed_hour
from r2serve.lab.serving import workdir
from r2serve.lab.serving.client import Load, LoadError, Run
from r2serve.lab.serving.journals import Journals
from r2serve.lab.serving.model import make_tiny_llama, prompts
from r2serve.lab.serving.places import LabPlace
from r2serve.lab.serving.plan import Plan, ServeError
from r2serve.lab.serving.progress import Progress
from r2serve.lab.serving.serve import Server, warm_server

logger = logging.getLogger(__name__)

NODES = 2
# More prompts than streams, so that batches change composition all the time.
PROMPTS_PER_STREAM = 1.5
WARM_UP_TOKENS = 32
# Requests of this duration usually overlap a fault.
REQUEST_S = 4.0
FEWEST_TOKENS, MOST_TOKENS = 16, 240
# Time without any token before a hang is declared: twice the default of link_timeout_s.
HANG_S = 60.0
COLLECT_S = 2.0


@dataclass(frozen=True)
class HourOptions:
    """Options of the hour. tensor_parallel: 2 or 4 ranks. seconds: length of the part to play."""

    tensor_parallel: int = 2
    seconds: float = HOUR_S
    streams: int = 8
    seed: int = 0
    rails: int = 2
    fallback: bool = True
    keep_logs: Path | None = None


def run_hour(options: HourOptions, progress: Progress) -> HourReport:
    """Plays the hour and returns the report, including failures of the run.

    Raises ScheduleError if options.seconds or options.rails allow no schedule; otherwise only
    interruptions and errors of the machine.
    """
    begun = time.monotonic()
    schedule = compressed_hour(options.seed, options.seconds, NODES, options.rails)
    fallback = "on" if options.fallback else "off"
    report = HourReport(
        mode=f"TP={options.tensor_parallel}, {NODES} nodes with {options.rails} rails each, "
        f"management fallback {fallback}",
        seed=options.seed,
        seconds=options.seconds,
        planned=len(schedule.faults),
        streams=options.streams,
    )
    labs.sweep()
    workdir.sweep()
    try:
        with (
            workdir.work_directory(options.keep_logs) as work,
            Lab(nodes=NODES, rails=options.rails) as lab,
        ):
            plan = Plan(
                label="hour",
                model=make_tiny_llama(work / "model"),
                r2ccl=True,
                lab=True,
                work=work,
                max_requests=options.streams,
                tensor_parallel=options.tensor_parallel,
                settings={"R2CCL_FALLBACK": fallback},
            )
            _serve(options, schedule, lab, plan, report, progress)
    except (ServeError, LoadError, LabUnavailableError) as error:
        logger.debug("the hour failed", exc_info=True)
        report.errors.append(str(error))
    report.took_s = time.monotonic() - begun
    return report


def _serve(
    options: HourOptions,
    schedule: Schedule,
    lab: Lab,
    plan: Plan,
    report: HourReport,
    progress: Progress,
) -> None:
    texts = prompts(round(options.streams * PROMPTS_PER_STREAM))
    places = [LabPlace(node) for node in lab.nodes]
    what = f"vllm serve over r2ccl, TP={options.tensor_parallel}"
    warm_up = (WARM_UP_TOKENS // 2, WARM_UP_TOKENS)
    first = texts[: options.streams]
    with warm_server(plan, places, what, first, warm_up, progress) as (server, warm):
        report.tokens_per_request = request_tokens(
            len(texts), warm.overall_tokens_per_second() / options.streams
        )
        with progress.step(f"reference: {len(texts)} prompts, without faults"):
            reference = server.stream(
                texts, report.tokens_per_request, "reference", progress.detail
            )
        if reference.failed:
            report.errors.append(f"{reference.failed} requests of the reference run failed")
            return
        title = f"{options.streams} streams through {len(schedule.faults)} faults"
        with progress.step(f"{title} in {options.seconds:g} s"):
            _play(options, schedule, lab, server, texts, reference, report, progress)


def request_tokens(prompts: int, tokens_per_second: float) -> list[int]:
    """Returns the tokens per request for a duration of about REQUEST_S at this stream rate.

    The numbers vary between prompts, so that requests overlap in different ways.
    """
    usual = max(FEWEST_TOKENS, min(tokens_per_second * REQUEST_S, MOST_TOKENS))
    return [round(usual * (0.7 + 0.15 * (index % 5))) for index in range(prompts)]


def _play(
    options: HourOptions,
    schedule: Schedule,
    lab: Lab,
    server: Server,
    texts: Sequence[str],
    reference: Run,
    report: HourReport,
    progress: Progress,
) -> None:
    path = server.plan.work / f"{server.plan.label}-disturbed.json"
    tokens = report.tokens_per_request
    load = Load(server.client, server.url, texts, tokens, path, streams=options.streams)
    load.wait_for_tokens(options.streams * 4, HANG_S)
    report.begin_ns = time.monotonic_ns()
    journals = Journals(server.journals())
    log = EventLog(journals, report.begin_ns)
    collected_at = time.monotonic()

    def attend() -> None:
        nonlocal collected_at
        server.check_alive()
        if load.silent_s > HANG_S:
            raise LoadError(f"no token of any stream for {HANG_S:.0f} s")
        if not load.running:
            raise LoadError("the load process ended early")
        progress.detail(f"{load.finished} requests, {load.tokens} tokens")
        if time.monotonic() - collected_at > COLLECT_S:
            log.collect()
            collected_at = time.monotonic()

    player = Player(
        schedule.faults,
        LabInjector(lab),
        seconds=schedule.seconds,
        rails=journals,
        attend=attend,
        watch=progress.line,
    )
    try:
        if not player.play():
            report.errors.append("not all rails were UP again at the end")
        load.drain()
    except (ServeError, LoadError) as error:
        report.errors.append(str(error))
        load.stop()
    run = load.finish(HANG_S, lambda: progress.detail("waiting for the last requests"))
    log.collect()
    report.add_run(reference, run)
    report.add_faults(player.played, log.events, run)
