"""Contenders in turns, through scenarios, with the same requests: a row a run."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from r2serve.bench.serve.contenders import Place, finish
from r2serve.bench.serve.outcome import Goal, describe
from r2serve.bench.serve.scenarios import Fault
from r2serve.bench.serve.strike import Strikes, Struck
from r2serve.bench.serve.workload import Workload
from r2serve.demo import workdir
from r2serve.demo.client import Load, LoadError, Run
from r2serve.demo.model import make_tiny_llama
from r2serve.demo.places import LocalPlace
from r2serve.demo.progress import Progress
from r2serve.demo.serve import ServeError, Server
from r2serve.drills import lab as labs
from r2serve.drills.lab import LabCommandError

STREAMS_OF_AN_OPEN_LOOP = 32
WARM_UP_STREAMS = 8


@dataclass(frozen=True)
class Options:
    """scenarios: their faults by name. pairs: how often each contender runs each scenario.

    patience_s: no token of any request for so long, and what is under way has failed.
    """

    workload: Workload
    contenders: Sequence[str]
    scenarios: Mapping[str, Sequence[Fault]]
    pairs: int = 1
    goal: Goal = field(default_factory=Goal)
    patience_s: float = 20.0
    keep_logs: Path | None = None

    @property
    def key(self) -> str:
        """Names what is measured: rows of the same key may stand beside each other."""
        what = {
            "workload": asdict(self.workload),
            "goal": asdict(self.goal),
            "patience_s": self.patience_s,
            "scenarios": {
                name: [str(fault) for fault in faults] for name, faults in self.scenarios.items()
            },
        }
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


class Rows:
    """Rows of a run, in a file where there is one: a line each, written as soon as it is known.

    A file that has rows of the same key and commit is gone on with; rows of others are left alone.
    """

    def __init__(self, path: Path | None, key: str, metadata: Mapping[str, Any]) -> None:
        self._path = path
        self._common = {
            "key": key,
            "commit": metadata["commit"],
            "date": metadata["date"],
            "command": metadata["command"],
            "machine": metadata["machine"],
        }
        self.rows: list[dict[str, Any]] = []
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                if row["key"] == key and row["commit"] == metadata["commit"]:
                    self.rows.append(row)

    def has(self, contender: str, scenario: str, pair: int) -> bool:
        """Whether it was measured; what could not run then is tried again."""
        return any(
            (row["contender"], row["scenario"], row["pair"]) == (contender, scenario, pair)
            and "not_run" not in row
            for row in self.rows
        )

    def add(self, row: Mapping[str, Any]) -> None:
        whole = {**row, **self._common}
        self.rows.append(whole)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(whole) + "\n")


def turns(options: Options) -> Iterator[tuple[int, str, str]]:
    """Pair, scenario, contender: contenders take turns, and another one begins each time."""
    count = 0
    for pair in range(options.pairs):
        for scenario in options.scenarios:
            first = count % len(options.contenders)
            order = [*options.contenders[first:], *options.contenders[:first]]
            for contender in order:
                yield pair, scenario, contender
            count += 1


def run(options: Options, rows: Rows, progress: Progress) -> None:
    """Measures what is not in ``rows`` yet, and puts it there.

    Raises LabUnavailableError where there can be no lab; a contender that does not start is a row
    that says so.
    """
    left = [turn for turn in turns(options) if not rows.has(turn[2], turn[1], turn[0])]
    if not left:
        progress.line("all of it has been measured: nothing to do")
        return
    labs.sweep()
    workdir.sweep()
    streams = options.workload.concurrency or STREAMS_OF_AN_OPEN_LOOP
    with workdir.work_directory(options.keep_logs) as work, contextlib.ExitStack() as stack:
        model = make_tiny_llama(work / "model")
        places = {
            name: stack.enter_context(Place(name, model, work, streams, progress.detail))
            for name in options.contenders
        }
        references: dict[str, Run] = {}
        why_not = _start_all(places, options, progress)
        for index, (pair, scenario, name) in enumerate(left):
            place = places[name]
            with progress.step(f"{index + 1} of {len(left)}: {scenario}, {name}"):
                row: dict[str, Any] = {"not_run": why_not[name]} if name in why_not else {}
                try:
                    if not row:
                        row = _measure(options, scenario, place, references, work, progress)
                except (ServeError, LoadError, LabCommandError) as error:
                    place.stop()
                    row = {"not_run": str(error)}
            rows.add({"scenario": scenario, "contender": name, "pair": pair, **row})


def _start_all(places: Mapping[str, Place], options: Options, progress: Progress) -> dict[str, str]:
    """Why those do not start that do not; all others run, since one that idles takes time, too."""
    why_not = {}
    for name, place in places.items():
        with progress.step(f"starting {place.command}"):
            try:
                place.server(options.workload.prompts[:WARM_UP_STREAMS])
            except (ServeError, LoadError) as error:
                why_not[name] = str(error)
                progress.line(f"{name} does not start: {error}")
    return why_not


def _measure(
    options: Options,
    scenario: str,
    place: Place,
    references: dict[str, Run],
    work: Path,
    progress: Progress,
) -> dict[str, Any]:
    workload, faults = options.workload, options.scenarios[scenario]
    server = place.server(workload.prompts[:WARM_UP_STREAMS])
    place.settle()
    if place.name not in references:
        references[place.name] = _once(options, server, work / f"{place.name}-ref.json", progress)
        if references[place.name].failed:
            failed = references.pop(place.name).failed
            raise LoadError(f"{failed} requests of the undisturbed run failed")
    load = _load(workload, server, work / f"{place.name}-run.json")
    with Strikes(
        place.lab, faults, lambda: load.begun_ns, place.rail_in_use, progress.line
    ) as strikes:
        result = finish(load, server, options.patience_s, progress.detail)
    row = describe(result, references[place.name], options.goal)
    row["faults"] = [_fault(struck, result) for struck in strikes.struck]
    row["serves"] = place.command
    if result.failed:
        place.stop()  # what is left of it is not what the next scenario is about
    return row


def _load(workload: Workload, server: Server, path: Path) -> Load:
    return Load(
        server.front,
        server.url,
        workload.prompts,
        workload.tokens,
        path,
        workload.concurrency or None,
        arrivals_s=workload.arrivals_s,
    )


def _once(options: Options, server: Server, path: Path, progress: Progress) -> Run:
    load = _load(options.workload, server, path)
    return finish(load, server, options.patience_s, progress.detail)


def _fault(struck: Struck, result: Run) -> dict[str, Any]:
    """What was done, in s since the first request, and the longest wait of a request around it."""
    begun_ns = min(request.sent_ns for request in result.requests if request.sent_ns)
    until_ns = struck.healed_ns or 2**63
    waits = [
        (b - a) / 1e6
        for request in result.requests
        for a, b in itertools.pairwise(request.times_ns)
        if b > struck.struck_ns and a < until_ns
    ]
    healed = None if struck.healed_ns is None else (struck.healed_ns - begun_ns) / 1e9
    return {
        "fault": str(struck.fault),
        "rails": list(struck.rails),
        "at_s": round((struck.struck_ns - begun_ns) / 1e9, 3),
        "healed_at_s": None if healed is None else round(healed, 3),
        "longest_gap_ms": round(max(waits), 3) if waits else None,
    }


def drive(
    url: str,
    model: str,
    options: Options,
    rows: Rows,
    progress: Progress,
    extra: Mapping[str, Any] | None,
) -> None:
    """The same requests against a server that runs already, twice: the first one is the reference.

    Raises LoadError where it breaks.
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
                            lambda load=load: progress.detail(
                                f"{load.finished} of {load.streams} requests"
                            ),
                        )
                    )
        finally:
            place.kill_all()
    reference, result = runs
    row = describe(result, reference, options.goal)
    rows.add({"scenario": "as it is", "contender": url, "pair": 0, **row, "faults": []})
