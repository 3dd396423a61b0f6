"""The flow of the demo: stage, server, reference run, faults, optional baseline."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from r2serve.demo import baseline
from r2serve.demo.faults import EngineInjector, FaultError, Striker
from r2serve.demo.report import FaultReport, ManagementReport, Report, compare
from r2serve.lab import lab as labs
from r2serve.lab.holder import LabUnavailableError
from r2serve.lab.injector import Injector, LabInjector
from r2serve.lab.lab import Lab
from r2serve.lab.player import REJOIN_TIMEOUT_S, Played
from r2serve.lab.serving import workdir
from r2serve.lab.serving.client import Load, LoadError, Run
from r2serve.lab.serving.journals import Journals
from r2serve.lab.serving.model import make_tiny_llama, prompts
from r2serve.lab.serving.places import LabPlace, LocalPlace, Place
from r2serve.lab.serving.plan import MAX_MODEL_LEN, Plan, ServeError, fault_file
from r2serve.lab.serving.progress import Progress
from r2serve.lab.serving.serve import RUN_TIMEOUT_S, STEP_TOKENS, Server, warm_server

logger = logging.getLogger(__name__)

RAILS = 2
WARM_UP_TOKENS = 96
# Worst-case duration of all faults, with observation, rejoin and rates before and after. Decoding
# must last longer, or a fault would find no step to hit.
FAULTS_TAKE_S = 36.0
SETTLE_S = 1.0


@dataclass(frozen=True)
class DemoOptions:
    """Options of the demo.

    requests: concurrent streams. tokens: per request; 0 = enough for the faults. servers: without
    namespaces, 1 server for both ranks, or 2. gpu: both ranks use the first GPU. engine: see
    :class:`r2serve.lab.serving.plan.Plan`.
    """

    requests: int = 8
    tokens: int = 0
    baseline: bool = False
    baseline_watch_s: float = 30.0
    namespaces: bool = True
    servers: int = 1
    gpu: bool = False
    keep_logs: Path | None = None
    engine: str = "vllm"


@dataclass(frozen=True)
class Stage:
    """The environment of the demo: places for the nodes' processes, and the lab if available."""

    places: Sequence[Place]
    lab: Lab | None
    mode: str


@contextlib.contextmanager
def _stage(options: DemoOptions, progress: Progress) -> Iterator[Stage]:
    with contextlib.ExitStack() as stack:
        lab: Lab | None = None
        if options.namespaces:
            try:
                lab = stack.enter_context(Lab(nodes=2, rails=RAILS))
            except LabUnavailableError as error:
                progress.line(f"network namespaces are not available ({error})")
        if lab is None:
            progress.line(
                "both ranks run on this machine as separate nodes (R2CCL_NODE=per-rank), "
                "with rails over loopback and faults inside the engine"
            )
            places = [LocalPlace() for _ in range(options.servers)]
            for place in places:
                stack.callback(place.kill_all)
            where = "one GPU" if options.gpu else "one machine"
            yield Stage(places, None, f"{where}, {RAILS} loopback rails, engine faults")
            return
        kind = "user namespace" if lab.rootless else "network namespaces"
        mode = f"2 nodes with {RAILS} rails each ({kind})"
        yield Stage([LabPlace(node) for node in lab.nodes], lab, mode)


def run_demo(options: DemoOptions, progress: Progress) -> Report:
    """Runs the demo and returns the report, including failures of the demo.

    Raises only interruptions and errors of the machine.
    """
    begun = time.monotonic()
    longer = ", and longer with the stock communicator" if options.baseline else ""
    progress.line(f"the demo takes about 4 minutes on two cores{longer}")
    labs.sweep()
    workdir.sweep()
    with (
        workdir.work_directory(options.keep_logs) as work,
        _stage(options, progress) as stage,
    ):
        report = Report(mode=stage.mode)
        with progress.step("creating a tiny Llama with random weights"):
            model = make_tiny_llama(work / "model")
        texts = prompts(options.requests)
        in_lab = stage.lab is not None
        plan = Plan(
            "r2ccl",
            model,
            True,
            in_lab,
            work,
            options.requests,
            gpu=options.gpu,
            engine=options.engine,
        )
        try:
            _serve_and_strike(options, progress, stage, plan, texts, report)
            if options.baseline:
                _baseline(options, progress, stage, plan, texts, report)
        except (ServeError, LoadError, FaultError) as error:
            logger.debug("the demo failed", exc_info=True)
            report.errors.append(str(error))
    report.seconds = time.monotonic() - begun
    return report


def _serve_and_strike(
    options: DemoOptions,
    progress: Progress,
    stage: Stage,
    plan: Plan,
    texts: Sequence[str],
    report: Report,
) -> None:
    what = f"{plan.engine} serve with --distributed-backend r2ccl, TP=2"
    warm_up = (WARM_UP_TOKENS, WARM_UP_TOKENS)
    with warm_server(plan, stage.places, what, texts, warm_up, progress) as (server, warm):
        with progress.step("a single stream, to measure the decode step"):
            one = server.stream(texts[:1], STEP_TOKENS, "one-stream", progress.detail)
            report.decode_step_ms = one.step_ms()
        rate = warm.overall_tokens_per_second() / len(texts)
        tokens = options.tokens or tokens_for(rate, FAULTS_TAKE_S)
        report.tokens_each = tokens
        with progress.step(f"reference: {len(texts)} streams of {tokens} tokens, without faults"):
            reference = server.stream(texts, tokens, "reference", progress.detail)
        if reference.failed:
            report.errors.append(f"{reference.failed} requests of the reference run failed")
            return
        report.tokens_per_s["undisturbed"] = reference.overall_tokens_per_second()
        with progress.step("the same streams, with failing NICs"):
            run = _disturbed(server, stage, texts, reference, progress, report)
        report.tokens_per_s["disturbed"] = run.overall_tokens_per_second()
        report.sent, report.completed = len(run.requests), run.completed
        report.mismatches, report.compared = compare(reference, run), True


def tokens_for(tokens_per_second: float, seconds: float) -> int:
    """Returns the tokens per stream for a duration at this rate, within the model's limit."""
    return max(256, min(int(tokens_per_second * seconds), MAX_MODEL_LEN - 256))


def _injector(stage: Stage, plan: Plan) -> Injector:
    lab = stage.lab
    return EngineInjector(fault_file(plan), RAILS) if lab is None else LabInjector(lab)


def _disturbed(
    server: Server,
    stage: Stage,
    texts: Sequence[str],
    reference: Run,
    progress: Progress,
    report: Report,
) -> Run:
    tokens = report.tokens_each
    path = server.plan.work / f"{server.plan.label}-disturbed.json"
    load = Load(server.client, server.url, texts, tokens, path)
    striker = Striker(
        Journals(server.journals()),
        _injector(stage, server.plan),
        step_s=reference.step_ms() / 1e3,
        decoding=lambda: load.running and load.tokens < load.expected_tokens,
        watch=progress.line,
    )
    load.wait_for_tokens(len(texts) * 16, RUN_TIMEOUT_S)
    time.sleep(SETTLE_S)
    management = None
    try:
        # A fault at each node, to cover the views of both nodes.
        first, fault = striker.fault("carrier_loss", node=0)
        report.faults.append(fault)
        time.sleep(SETTLE_S)
        _, fault = striker.fault("black_hole", node=1, avoid=first)
        report.faults.append(fault)
        if stage.lab is not None:
            time.sleep(SETTLE_S)
            management = striker.management(node=1)
    except FaultError as error:
        report.errors.append(str(error))
    run = load.finish(
        RUN_TIMEOUT_S,
        lambda: progress.detail(f"{load.tokens} of {load.expected_tokens} tokens"),
    )
    for fault, played in zip(report.faults, striker.played, strict=True):
        _add_rates(fault, played, run)
    if management is not None:
        _add_management(report, management, run)
    return run


def _add_management(report: Report, played: Played, run: Run) -> None:
    assert played.healed_ns is not None
    gap_ms = run.longest_gap_ms(played.struck_ns, played.healed_ns)
    if gap_ms is None:
        report.errors.append("no token came after the loss of the management NIC")
        return
    away_s = (played.healed_ns - played.struck_ns) / 1e9
    report.management = ManagementReport(played.fault.node, away_s, gap_ms)


def _add_rates(fault: FaultReport, played: Played, run: Run) -> None:
    second = 1_000_000_000
    struck_ns, healed_ns = played.struck_ns, played.healed_ns
    assert healed_ns is not None
    back_ns = played.back_ns or healed_ns + int(REJOIN_TIMEOUT_S * second)  # end of the wait
    fault.tokens_per_s = {
        "before": run.tokens_per_second(struck_ns - second, struck_ns),
        "during": run.tokens_per_second(struck_ns, healed_ns),
        "after": run.tokens_per_second(back_ns, back_ns + second),
    }


def _baseline(
    options: DemoOptions,
    progress: Progress,
    stage: Stage,
    plan: Plan,
    texts: Sequence[str],
    report: Report,
) -> None:
    if stage.lab is None:
        progress.line("no baseline: the stock communicator's rail can fail only in namespaces")
        return
    stock = Plan("stock", plan.model, False, True, plan.work, plan.max_requests, engine=plan.engine)
    report.baseline = baseline.measure(
        stock, stage.lab, stage.places, texts, options.baseline_watch_s, progress
    )
