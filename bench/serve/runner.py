"""Runs contenders in turns through scenarios, with the same requests; a run gives a row."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from r2serve.bench.serve import impact, rounds, worker_gaps
from r2serve.bench.serve.contenders import ContenderServer, how_far
from r2serve.bench.serve.outcome import Goal, describe
from r2serve.bench.serve.scenarios import MANAGEMENT_RAIL, line_of
from r2serve.bench.serve.store import Row, Rows, TokenTimes
from r2serve.bench.serve.strike import MissedFaultsError, check_made, strikes
from r2serve.bench.serve.workload import Workload
from r2serve.lab import lab as labs
from r2serve.lab.holder import LabCommandError
from r2serve.lab.player import Played
from r2serve.lab.schedule import Fault
from r2serve.lab.serving import workdir
from r2serve.lab.serving.client import Load, LoadError, Run
from r2serve.lab.serving.model import make_tiny_llama
from r2serve.lab.serving.places import LocalPlace
from r2serve.lab.serving.plan import ServeError
from r2serve.lab.serving.progress import Progress
from r2serve.lab.serving.serve import Server

STREAMS_OF_AN_OPEN_LOOP = 32
WARM_UP_STREAMS = 8


@dataclass(frozen=True)
class RunOptions:
    """Options of a measurement.

    scenarios: faults by name of the scenario. pairs: runs of each scenario per contender.
    patience_s: if no token of any request arrives for this time, all requests under way have
    failed. engine: a key of ``ENGINES`` in r2serve/lab/serving/serve.py.
    """

    workload: Workload
    contenders: Sequence[str]
    scenarios: Mapping[str, Sequence[Fault]]
    pairs: int = 1
    goal: Goal = field(default_factory=Goal)
    patience_s: float = 20.0
    keep_logs: Path | None = None
    engine: str = "vllm"

    def key(self, scenario: str) -> str:
        """Returns a hash of workload, limits and faults: rows with the same key are comparable."""
        what = {
            "workload": asdict(self.workload),
            "goal": asdict(self.goal),
            "patience_s": self.patience_s,
            "faults": [line_of(fault) for fault in self.scenarios.get(scenario, ())],
        }
        if scenario in MANAGEMENT_RAIL:
            what["management_rail"] = MANAGEMENT_RAIL[scenario]
        if self.engine != "vllm":  # keys of earlier results stay as they are
            what["engine"] = self.engine
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


Turn = tuple[int, str, str]
"""Pair, scenario and contender."""
Site = tuple[str, int | None]
"""Contender, and the rail that carries control traffic, too (None: a management NIC does)."""


def turns(options: RunOptions) -> Iterator[Turn]:
    """Yields (pair, scenario, contender) for every run.

    The first contender changes from scenario to scenario. The order of the scenarios is reversed
    from pair to pair, so that no scenario always has the older engines.
    """
    count = 0
    for pair in range(options.pairs):
        scenarios = list(options.scenarios)
        for scenario in scenarios if pair % 2 == 0 else reversed(scenarios):
            first = count % len(options.contenders)
            order = [*options.contenders[first:], *options.contenders[:first]]
            for contender in order:
                yield pair, scenario, contender
            count += 1


def run(options: RunOptions, rows: Rows, progress: Progress) -> list[Row]:
    """Measures all runs missing in ``rows``, adds the runs, and returns the rows of all runs.

    A contender that does not start gets a row with the reason, and so does a run that ends before
    its last fault. Raises LabUnavailableError on a machine without support for labs.
    """
    found = {
        turn: rows.find(options.key(turn[1]), turn[1], turn[2], turn[0]) for turn in turns(options)
    }
    left = [turn for turn, row in found.items() if row is None]
    if not left:
        progress.line("all runs are already measured: nothing to do")
    else:
        progress.line(f"{len(left)} runs to measure, {len(found) - len(left)} already measured")
        found |= _measure_all(options, left, rows, progress)
    return [row for row in found.values() if row is not None]


def _measure_all(
    options: RunOptions, left: Sequence[Turn], rows: Rows, progress: Progress
) -> dict[Turn, Row]:
    labs.sweep()
    workdir.sweep()
    streams = options.workload.concurrency or STREAMS_OF_AN_OPEN_LOOP
    with workdir.work_directory(options.keep_logs) as work, contextlib.ExitStack() as stack:
        model = make_tiny_llama(work / "model")
        sites = dict.fromkeys((name, MANAGEMENT_RAIL.get(scenario)) for _, scenario, name in left)
        places = {
            site: stack.enter_context(_place(site, model, work, streams, options, progress))
            for site in sites
        }
        why_not = _start_all(places, options, progress)
        bench = _Bench(options, work, progress)
        found = {}
        for index, (pair, scenario, name) in enumerate(left):
            site = name, MANAGEMENT_RAIL.get(scenario)
            with progress.step(f"{index + 1} of {len(left)}: {scenario}, {name}"):
                row: dict[str, Any] = {"not_run": why_not[site]} if site in why_not else {}
                times = None
                try:
                    if not row:
                        row, times = bench.measure(scenario, places[site])
                except (ServeError, LoadError, LabCommandError) as error:
                    places[site].stop()
                    row = {"not_run": str(error)}
                except MissedFaultsError as error:
                    row = {"not_run": str(error), "missed_faults": error.missed}
            about = {"scenario": scenario, "contender": name, "pair": pair}
            key = options.key(scenario)
            found[pair, scenario, name] = rows.add({**about, "key": key, **row}, times)
        return found


def _place(
    site: Site, model: Path, work: Path, streams: int, options: RunOptions, progress: Progress
) -> ContenderServer:
    name, rail = site
    return ContenderServer(
        name,
        model,
        work,
        streams,
        progress.detail,
        label=name if rail is None else f"{name}-on-rail{rail}",
        engine=options.engine,
        management_rail=rail,
        records_steps=True,
    )


def _start_all(
    places: Mapping[Site, ContenderServer], options: RunOptions, progress: Progress
) -> dict[Site, str]:
    """Starts all contenders; returns the reasons of failed starts.

    All contenders run during the whole measurement, because an idle engine also takes CPU time.
    """
    why_not = {}
    for site, place in places.items():
        with progress.step(f"starting {place.label}"):
            try:
                place.server(options.workload.prompts[:WARM_UP_STREAMS])
            except (ServeError, LoadError) as error:
                why_not[site] = str(error)
                progress.line(f"{place.label} does not start: {error}")
    return why_not


class _Bench:
    """Runs started contenders; each contender has an undisturbed run as reference."""

    def __init__(self, options: RunOptions, work: Path, progress: Progress) -> None:
        self._options = options
        self._work = work
        self._progress = progress
        self._references: dict[str, Run] = {}

    def measure(self, scenario: str, place: ContenderServer) -> tuple[dict[str, Any], TokenTimes]:
        """Measures a run; returns the row and the arrival times of the tokens.

        Raises MissedFaultsError when the requests end before the last fault.
        """
        workload, faults = self._options.workload, self._options.scenarios[scenario]
        server = place.server(workload.prompts[:WARM_UP_STREAMS])
        place.settle()
        reference = self._reference(place, server)
        load = self._load(place, server, "run")
        with strikes(
            place.lab, faults, lambda: load.begun_ns, place.rail_in_use, self._progress.line
        ) as play:
            result = place.finish(load, self._options.patience_s, self._progress.detail)
        row = describe(result, reference, self._options.goal)
        row["worker_gaps"] = _worker_gaps(place, result)
        row["faults"] = [_fault(struck, result) for struck in play.played]
        row["serves"] = place.command
        row["restarts"] = place.restarts
        if place.contender.r2ccl:
            row["impact"] = self._impact(server, result, reference)
        if result.failed or (faults and place.contender.renew):
            place.stop()  # the next scenario starts with a new engine
        check_made(faults, play.played, result)
        return row, TokenTimes.of(result)

    def _reference(self, place: ContenderServer, server: Server) -> Run:
        if place.label not in self._references:
            load = self._load(place, server, "reference")
            run = place.finish(load, self._options.patience_s, self._progress.detail)
            if run.failed:
                raise LoadError(f"{run.failed} requests of the undisturbed run failed")
            self._references[place.label] = run
        return self._references[place.label]

    def _load(self, place: ContenderServer, server: Server, label: str) -> Load:
        workload = self._options.workload
        return Load(
            server.client,
            server.url,
            workload.prompts,
            workload.tokens,
            self._work / f"{place.label}-{label}.json",
            workload.concurrency or None,
            arrivals_s=workload.arrivals_s,
            retry=place.contender.supervised,
        )

    def _impact(self, server: Server, result: Run, reference: Run) -> dict[str, Any]:
        """Compares the delays reported by the API node's sidecar with the clients' delays."""
        try:
            held = impact.ask(server.journals()[0], self._work / "sidecar.log")
        except impact.ImpactError as error:
            return {"not_run": str(error)}
        found = impact.compare(held, result, reference)
        return {
            "requests": [asdict(each) for each in found],
            "agree": sum(each.agrees for each in found),
            "partly_known": impact.partly_known(held, result),
            "jitter_ms": rounds.jitter_ms(reference),
        }


def _worker_gaps(place: ContenderServer, result: Run) -> dict[str, Any] | None:
    """Returns the gaps in the engine's processes from the first request to the last token."""
    sent = [request.sent_ns for request in result.requests if request.sent_ns]
    times = [request.times_ns[-1] for request in result.requests if request.times_ns]
    if not sent or not times:
        return None
    return worker_gaps.measured(place.records, min(sent), max(times))


def _fault(struck: Played, result: Run) -> dict[str, Any]:
    """Returns a fault's times (s since the first request) and the longest gap during the fault."""
    begun_ns = min(request.sent_ns for request in result.requests if request.sent_ns)
    gap_ms = result.longest_gap_ms(struck.struck_ns, struck.healed_ns or 2**63)
    healed = None if struck.healed_ns is None else (struck.healed_ns - begun_ns) / 1e9
    return {
        "fault": line_of(struck.fault),
        "rails": list(struck.rails),
        "at_s": round((struck.struck_ns - begun_ns) / 1e9, 3),
        "healed_at_s": None if healed is None else round(healed, 3),
        "longest_gap_ms": None if gap_ms is None else round(gap_ms, 3),
    }


def _tell(progress: Progress, load: Load) -> None:
    progress.detail(how_far(load))


def drive(
    url: str,
    model: str,
    options: RunOptions,
    rows: Rows,
    progress: Progress,
    extra: Mapping[str, Any] | None,
) -> list[Row]:
    """Sends the same requests twice to a running server; the first run is the reference.

    Raises LoadError when the load fails.
    """
    place = LocalPlace()
    with workdir.work_directory(options.keep_logs) as work:
        try:
            runs = []
            for name in ("reference", "run"):
                with progress.step(f"{name}: {len(options.workload.prompts)} requests"):
                    load = Load(
                        place,
                        url,
                        options.workload.prompts,
                        options.workload.tokens,
                        work / f"{name}.json",
                        options.workload.concurrency or None,
                        model=model,
                        arrivals_s=options.workload.arrivals_s,
                        extra=extra,
                    )
                    runs.append(
                        load.finish(
                            options.patience_s,
                            partial(_tell, progress, load),
                        )
                    )
        finally:
            place.kill_all()
    reference, result = runs
    row = describe(result, reference, options.goal)
    about = {"scenario": "as it is", "contender": url, "pair": 0, "key": options.key("as it is")}
    return [rows.add({**about, **row, "faults": []}, TokenTimes.of(result))]
