"""``r2serve bench serve``: measures the cost of rail faults to requests."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from r2serve.bench.collectives import machine
from r2serve.bench.collectives.markdown import MarkerError
from r2serve.bench.collectives.names import Named
from r2serve.bench.serve import (
    against_stock,
    alternate,
    compare,
    plots,
    report,
    runner,
    worker_gaps,
)
from r2serve.bench.serve.alternate import Alternation
from r2serve.bench.serve.alternation import AlternationError
from r2serve.bench.serve.contenders import CONTENDERS
from r2serve.bench.serve.outcome import Goal
from r2serve.bench.serve.scenarios import SCENARIOS, line_of, named, notes_on, parse, scenario
from r2serve.bench.serve.store import Row, Rows
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
    "--usual",
    metavar="SETTING",
    help="Setting of the usual state with --alternate (`R2CCL_CONTROL=direct`), for a comparison "
    "of two settings.",
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
def command(**given: Any) -> None:
    """Measure TTFT, time per token and end-to-end latency of requests under rail faults.

    Without --url, every contender serves a tiny model over two nodes with two rails, in network
    namespaces (needs root). All contenders take the same requests through the same scenarios, in
    turns.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options = Given(**given)
    _refuse_combinations(options)
    if options.alternated is not None:
        _alternate_states(options, options.alternated)
    else:
        _measure(options)


@dataclass(frozen=True)
class Given:
    """The options of :func:`command`, as given."""

    url: str | None
    model: str | None
    openai: bool
    contenders: tuple[str, ...]
    engine: str
    scenarios: tuple[str, ...]
    schedule: Path | None
    alternated: str | None
    usual: str | None
    alternations: int
    switch_s: float
    requests: int
    rate: float | None
    concurrency: int | None
    prompt_tokens: int
    output_tokens: int | None
    sigma: float
    sharegpt: Path | None
    slo_ttft_ms: float
    slo_tpot_ms: float
    pairs: int
    patience_s: float
    seed: int
    json_path: Path | None
    out: Path | None
    docs: Path | None
    label: str
    keep_logs: Path | None


def _refuse_combinations(given: Given) -> None:
    """Raises UsageError for options that exclude each other."""
    if given.url is not None and (given.scenarios or given.schedule):
        raise click.UsageError(
            "--url: faults are made in networks of started contenders only; leave out --scenario "
            "and --faults"
        )
    known = CONTENDERS_OF.get(given.engine, tuple(CONTENDERS))
    if not set(given.contenders) <= set(known):
        raise click.UsageError(
            f"--contender: {', '.join(given.contenders)} with --engine {given.engine}: must be "
            f"{' or '.join(known)}"
        )
    if given.scenarios and given.schedule:
        raise click.UsageError("--scenario and --faults: cannot be combined; leave out either")
    if given.alternated is not None:
        measured = given.scenarios or given.schedule or given.sharegpt
        if measured or given.url is not None or given.rate is not None:
            raise click.UsageError(
                "--alternate: must be given without --url, --scenario, --faults, --sharegpt and "
                "--rate"
            )
        if given.engine != "vllm":
            raise click.UsageError(f"--alternate: --engine is {given.engine}: must be vllm")
        if len(given.contenders) != 1:
            raise click.UsageError(f"--alternate: {len(given.contenders)} contenders: must be 1")
    elif given.usual is not None:
        raise click.UsageError("--usual: needs --alternate, the setting to compare with")
    elif given.out is None and given.docs is not None:
        raise click.UsageError("--docs: needs --out, the directory for pictures")


def _alternate_states(given: Given, what: str) -> None:
    try:
        state = Alternation.of(
            what, switch_s=given.switch_s, alternations=given.alternations, usual=given.usual
        )
    except (ScheduleError, ConfigError) as error:
        raise click.UsageError(f"--alternate: {error}") from error
    _tell_notes(what)
    length = Lengths(given.output_tokens or OUTPUT_TOKENS_ALTERNATED, sigma=0, least=2)
    same = synthetic(PROMPTS_ALTERNATED, given.seed, Lengths(given.prompt_tokens, sigma=0), length)
    workload = arrange(same, given.seed, concurrency=given.concurrency or 4)
    _alternate(state, given.contenders[0], workload, given.json_path, given.keep_logs)


def _measure(given: Given) -> None:
    options = _run_options(given)
    rows, about = _rows(given)
    progress = Progress(Console(stderr=True))
    try:
        if given.url is not None:
            extra: dict[str, Any] | None = {} if given.openai else None
            model = given.model or _model(given.url)
            found = runner.drive(given.url, model, options, rows, progress, extra)
        else:
            found = runner.run(options, rows, progress)
    except (LabUnavailableError, LoadError, ServeError) as error:
        raise click.ClickException(str(error)) from error
    verdicts = compare.verdicts(found)
    report.show(found, verdicts, _notes(found))
    others = rows.tidy(found)
    if given.out is not None:
        pictures = plots.draw(found, rows.times, given.out)
        report.write_page(found, verdicts, pictures, given.out / "index.html")
        progress.line(f"page written: {given.out / 'index.html'}")
        if given.docs is not None:
            now = [*found, *(row for row in others if row["commit"] == about["commit"])]
            shown = _beside(given.docs, pictures)
            report.put(found, others, compare.verdicts(now), shown, given.docs, _notes(now))
    _refuse_missed_faults(found)


def _refuse_missed_faults(rows: Sequence[Row]) -> None:
    """Raises ClickException if the requests of a run ended before its last fault."""
    early = [f"{row['scenario']}, {row['contender']}" for row in rows if "missed_faults" in row]
    if early:
        raise click.ClickException(
            f"faults were missed, because the requests ended too early: {'; '.join(early)}"
        )


def _notes(rows: Sequence[Row]) -> list[str]:
    """Returns results besides the verdicts, a sentence each."""
    return [*map(str, worker_gaps.verdicts(rows)), *map(str, against_stock.ratios(rows))]


def _run_options(given: Given) -> runner.RunOptions:
    """Returns the requests and faults. Raises UsageError for an impossible value."""
    rate, concurrency = given.rate, given.concurrency
    if rate is None and concurrency is None:
        concurrency = 4
    try:
        output = Lengths(given.output_tokens or 48, given.sigma, least=2)
        if given.sharegpt is not None:
            asked = from_sharegpt(given.sharegpt, given.requests, given.seed, output)
        else:
            prompt = Lengths(given.prompt_tokens, given.sigma)
            asked = synthetic(given.requests, given.seed, prompt, output)
        workload = arrange(asked, given.seed, rate=rate or 0.0, concurrency=concurrency or 0)
        faults = _faults(given.scenarios, given.schedule)
        if workload.concurrency == 0:
            _check_times(faults, workload)
    except (ScheduleError, WorkloadError) as error:
        raise click.UsageError(str(error)) from error
    return runner.RunOptions(
        workload=workload,
        contenders=given.contenders,
        scenarios=faults,
        pairs=given.pairs,
        goal=Goal(given.slo_ttft_ms, given.slo_tpot_ms),
        patience_s=given.patience_s,
        keep_logs=given.keep_logs,
        engine=given.engine,
    )


def _rows(given: Given) -> tuple[Rows, dict[str, Any]]:
    """Opens the file of results; returns the rows, and the facts of this run.

    Raises ClickException if the file, or the page of --docs, cannot be continued.
    """
    label, path = given.label, given.json_path
    if given.engine != "vllm":  # results of engines must not replace each other
        label = label or given.engine
    if given.out is not None:
        path = path or given.out / "rows.jsonl"
    try:
        if given.docs is not None:
            report.split(given.docs)
        about = machine.describe(sys.argv[1:])
        folder = None if given.out is None else given.out / "runs"
        return Rows(path, about, label=label, folder=folder), about
    except (ValueError, MarkerError) as error:
        raise click.ClickException(str(error)) from error


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
