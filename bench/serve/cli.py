"""``r2serve bench serve``: measures the cost of rail faults to requests."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from r2serve.bench.collectives import machine
from r2serve.bench.collectives.markdown import MarkerError
from r2serve.bench.collectives.names import Named
from r2serve.bench.serve import alternate, compare, plots, report, runner
from r2serve.bench.serve.alternate import Alternation
from r2serve.bench.serve.alternation import AlternationError
from r2serve.bench.serve.contenders import CONTENDERS
from r2serve.bench.serve.outcome import Goal
from r2serve.bench.serve.scenarios import SCENARIOS, line_of, named, notes_on, parse, scenario
from r2serve.bench.serve.store import Rows
from r2serve.bench.serve.workload import (
    Lengths,
    Workload,
    WorkloadError,
    arrange,
    from_sharegpt,
    synthetic,
)
from r2serve.errors import ConfigError
from r2serve.lab.holder import LabCommandError, LabUnavailableError
from r2serve.lab.schedule import Fault, ScheduleError
from r2serve.lab.serving.client import LoadError
from r2serve.lab.serving.plan import ServeError
from r2serve.lab.serving.progress import Progress
from r2serve.lab.serving.serve import ENGINES

_ASKED_S = 10.0
PROMPTS_ALTERNATED = 64
OUTPUT_TOKENS_ALTERNATED = 24
"""Default with --alternate: a request must last at most 1 s."""
CONTENDERS_OF = {"sglang": ("gloo", "r2ccl")}
"""Contenders that have been tried with an engine; an engine without an entry has all."""
PICTURES_OF_DOCS = (
    "serve-carrier-loss-timeline.png",
    "serve-black-hole-timeline.png",
    "serve-carrier-loss-cdf.png",
    "serve-impact.png",
)


def _one_of(names: Any, default: str) -> str:
    return f"{', '.join(names)}.  [default: {default}]"


@click.command(name="serve")
@click.option("--url", help="Measure a running server at this URL instead of starting contenders.")
@click.option("--model", help="Model of the server.  [default: the first model listed]")
@click.option(
    "--openai",
    is_flag=True,
    help="The server supports only OpenAI's fields: each piece of text counts as a token.",
)
@click.option(
    "--contender",
    "contenders",
    multiple=True,
    type=click.Choice(list(CONTENDERS)),
    default=("r2ccl",),
    help=_one_of((f"{name} ({each.meaning})" for name, each in CONTENDERS.items()), "r2ccl"),
)
@click.option(
    "--engine",
    type=click.Choice(list(ENGINES)),
    default="vllm",
    show_default=True,
    help="The engine of every contender.",
)
@click.option(
    "--scenario",
    "scenarios",
    multiple=True,
    type=Named(SCENARIOS, named),
    help=_one_of(SCENARIOS, "healthy"),
)
@click.option(
    "--faults",
    "schedule",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with a schedule of faults, a fault per line: "
    "`at: 12s, carrier_loss: rail0@node1, for: 8s`.",
)
@click.option(
    "--alternate",
    "alternated",
    metavar="STATE",
    help="Switch a state on and off under the same load, and compare. STATE is `nothing` (shows "
    "the error of the method), a fault as in --faults (`carrier_loss: rail0@node1`), or a setting "
    "(`R2CCL_FALLBACK=off`, with two engines).",
)
@click.option(
    "--alternations",
    type=click.IntRange(min=9),
    default=200,
    show_default=True,
    help="Number of switches with --alternate.",
)
@click.option(
    "--switch-s",
    type=click.FloatRange(min=alternate.LEAST_SWITCH_S),
    default=5.0,
    show_default=True,
    help="Seconds between switches with --alternate.",
)
@click.option("--requests", type=click.IntRange(min=1), default=60, show_default=True)
@click.option(
    "--rate", type=click.FloatRange(min=0), help="Open loop: Poisson arrivals per second."
)
@click.option(
    "--concurrency",
    type=click.IntRange(min=1),
    help="Closed loop: requests under way at a time.  [default: 4]",
)
@click.option("--prompt-tokens", type=click.IntRange(1, 4096), default=32, show_default=True)
@click.option(
    "--output-tokens",
    type=click.IntRange(2, 4096),
    help=f"[default: 48; {OUTPUT_TOKENS_ALTERNATED} with --alternate]",
)
@click.option(
    "--sigma",
    type=click.FloatRange(0, 3),
    default=0.5,
    show_default=True,
    help="Sigma of the log-normal numbers of prompt and output tokens.",
)
@click.option(
    "--sharegpt",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Take prompts and lengths from this file in ShareGPT's format.",
)
@click.option("--slo-ttft-ms", type=float, default=1000.0, show_default=True)
@click.option("--slo-tpot-ms", type=float, default=200.0, show_default=True)
@click.option(
    "--pairs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Runs of each scenario per contender, in turns.",
)
@click.option(
    "--patience",
    "patience_s",
    type=float,
    default=20.0,
    show_default=True,
    help="Seconds without any token, after which all requests under way count as lost.",
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Results, a line per run; an existing file is continued.  [default: DIR/rows.jsonl]",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory DIR for pictures, a page, and the time of each token.",
)
@click.option(
    "--docs",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Markdown page with markers for results; needs --out.",
)
@click.option(
    "--label", default="", help="Name of the measurement, for a file with several measurements."
)
@click.option("--keep-logs", type=click.Path(file_okay=False, path_type=Path))
def command(
    url: str | None,
    model: str | None,
    openai: bool,
    contenders: tuple[str, ...],
    engine: str,
    scenarios: tuple[str, ...],
    schedule: Path | None,
    alternated: str | None,
    alternations: int,
    switch_s: float,
    requests: int,
    rate: float | None,
    concurrency: int | None,
    prompt_tokens: int,
    output_tokens: int | None,
    sigma: float,
    sharegpt: Path | None,
    slo_ttft_ms: float,
    slo_tpot_ms: float,
    pairs: int,
    patience_s: float,
    seed: int,
    json_path: Path | None,
    out: Path | None,
    docs: Path | None,
    label: str,
    keep_logs: Path | None,
) -> None:
    """Measure TTFT, time per token and end-to-end latency of requests under rail faults.

    Without --url, every contender serves a tiny model over two nodes with two rails, in network
    namespaces (needs root). All contenders take the same requests through the same scenarios, in
    turns.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if url is not None and (scenarios or schedule):
        raise click.UsageError(
            "--url: faults are made in networks of started contenders only; leave out --scenario "
            "and --faults"
        )
    known = CONTENDERS_OF.get(engine, tuple(CONTENDERS))
    if not set(contenders) <= set(known):
        raise click.UsageError(
            f"--contender: {', '.join(contenders)} with --engine {engine}: must be "
            f"{' or '.join(known)}"
        )
    if scenarios and schedule:
        raise click.UsageError("--scenario and --faults: cannot be combined; leave out either")
    if alternated is not None:
        if url is not None or scenarios or schedule or sharegpt or rate is not None:
            raise click.UsageError(
                "--alternate: must be given without --url, --scenario, --faults, --sharegpt and "
                "--rate"
            )
        if engine != "vllm":
            raise click.UsageError(f"--alternate: --engine is {engine}: must be vllm")
        if len(contenders) != 1:
            raise click.UsageError(f"--alternate: {len(contenders)} contenders: must be 1")
        try:
            state = Alternation.of(alternated, switch_s=switch_s, alternations=alternations)
        except (ScheduleError, ConfigError) as error:
            raise click.UsageError(f"--alternate: {error}") from error
        _tell_notes(alternated)
        length = Lengths(output_tokens or OUTPUT_TOKENS_ALTERNATED, sigma=0, least=2)
        same = synthetic(PROMPTS_ALTERNATED, seed, Lengths(prompt_tokens, sigma=0), length)
        return _alternate(
            state,
            contenders[0],
            arrange(same, seed, concurrency=concurrency or 4),
            json_path,
            keep_logs,
        )
    if out is None and docs is not None:
        raise click.UsageError("--docs: needs --out, the directory for pictures")
    try:
        output = Lengths(output_tokens or 48, sigma, least=2)
        if sharegpt is not None:
            asked = from_sharegpt(sharegpt, requests, seed, output)
        else:
            asked = synthetic(requests, seed, Lengths(prompt_tokens, sigma), output)
        if rate is None and concurrency is None:
            concurrency = 4
        workload = arrange(asked, seed, rate=rate or 0.0, concurrency=concurrency or 0)
        faults = _faults(scenarios, schedule)
        if workload.concurrency == 0:
            _check_times(faults, workload)
    except (ScheduleError, WorkloadError) as error:
        raise click.UsageError(str(error)) from error
    options = runner.RunOptions(
        workload=workload,
        contenders=contenders,
        scenarios=faults,
        pairs=pairs,
        goal=Goal(slo_ttft_ms, slo_tpot_ms),
        patience_s=patience_s,
        keep_logs=keep_logs,
        engine=engine,
    )
    if engine != "vllm":  # results of engines must not replace each other
        label = label or engine
    if out is not None:
        json_path = json_path or out / "rows.jsonl"
    try:
        if docs is not None:
            report.split(docs)
        about = machine.describe(sys.argv[1:])
        folder = None if out is None else out / "runs"
        rows = Rows(json_path, about, label=label, folder=folder)
    except (ValueError, MarkerError) as error:
        raise click.ClickException(str(error)) from error
    progress = Progress(Console(stderr=True))
    try:
        if url is not None:
            extra: dict[str, Any] | None = {} if openai else None
            found = runner.drive(url, model or _model(url), options, rows, progress, extra)
        else:
            found = runner.run(options, rows, progress)
    except (LabUnavailableError, LoadError, ServeError) as error:
        raise click.ClickException(str(error)) from error
    verdicts = compare.verdicts(found)
    report.show(found, verdicts)
    others = rows.tidy(found)
    if out is not None:
        pictures = plots.draw(found, rows.times, out)
        report.write_page(found, verdicts, pictures, out / "index.html")
        progress.line(f"page written: {out / 'index.html'}")
        if docs is not None:
            now = [*found, *(row for row in others if row["commit"] == about["commit"])]
            report.put(found, others, compare.verdicts(now), _beside(docs, pictures), docs)


def _alternate(
    state: Alternation,
    contender: str,
    workload: Workload,
    json_path: Path | None,
    keep_logs: Path | None,
) -> None:
    about = machine.describe(sys.argv[1:])
    progress = Progress(Console(stderr=True))
    try:
        outcome = alternate.run(state, contender, workload, progress, keep_logs=keep_logs)
    except (LabUnavailableError, LabCommandError, LoadError, ServeError, AlternationError) as error:
        raise click.ClickException(str(error)) from error
    found = outcome.compared
    click.echo(
        f"{state.what}, switched {state.alternations} times, every {state.switch_s:g} s: "
        f"TPOT {found.tpot}, E2E {found.e2e}; {found.requests} requests in {found.windows} "
        f"windows, {found.straddled} beside a switch, {outcome.failed} failed; "
        f"E2E p50 {outcome.e2e_s:.2f} s"
    )
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        with json_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**about, **outcome.as_row(state, contender)}) + "\n")
    if outcome.failed:
        raise click.ClickException(f"{outcome.failed} requests failed")


def _beside(docs: Path, pictures: Mapping[str, Path]) -> dict[str, Path]:
    """Copies the pictures shown in the documentation into the folder of ``docs``."""
    shown = {title: path for title, path in pictures.items() if path.name in PICTURES_OF_DOCS}
    return {title: Path(shutil.copy(path, docs.parent)) for title, path in shown.items()}


def _faults(scenarios: tuple[str, ...], schedule: Path | None) -> dict[str, tuple[Fault, ...]]:
    if schedule is not None:
        text = schedule.read_text(encoding="utf-8")
        try:
            faults = parse(text)
        except ScheduleError as error:
            raise ScheduleError(f"{schedule}: {error}") from error
        _tell_notes(text)
        return {schedule.stem: faults}
    return {name: scenario(name) for name in scenarios or ("healthy",)}


def _tell_notes(schedule: str) -> None:
    for note in notes_on(schedule):
        click.echo(note, err=True)


def _check_times(scenarios: dict[str, tuple[Fault, ...]], workload: Workload) -> None:
    for name, faults in scenarios.items():
        for fault in faults:
            if fault.at_s >= workload.seconds:
                raise ScheduleError(
                    f"{name}: `{line_of(fault)}` begins when the last request is due or later: "
                    f"must be before {workload.seconds:.1f} s; use more requests or a lower rate"
                )


def _model(url: str) -> str:
    """Returns the first model listed by a server."""
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=_ASKED_S) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise click.UsageError(
            f"--url {url}: cannot read a model from /v1/models: {error}"
        ) from error
