"""``r2serve bench serve --alternate``: compares two alternating states under the same load.

A fault begins and ends under the same engine.  A setting is fixed when an engine starts: two
engines run side by side, and the load alternates between the engines.  With ``nothing`` both states
are the same (A/A), and the result shows the error of the method.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from r2serve.bench.serve.alternation import (
    AlternationError,
    Compared,
    StateWindow,
    compare,
    windows_of,
)
from r2serve.bench.serve.contenders import ContenderServer
from r2serve.bench.serve.scenarios import parse
from r2serve.bench.serve.strike import strikes
from r2serve.bench.serve.workload import Workload
from r2serve.config import Config
from r2serve.errors import ConfigError
from r2serve.lab import lab as labs
from r2serve.lab.schedule import Aim, Fault, ScheduleError
from r2serve.lab.serving import workdir
from r2serve.lab.serving.client import Load, LoadError, Request, Run, Turns
from r2serve.lab.serving.model import make_tiny_llama
from r2serve.lab.serving.progress import Progress
from r2serve.option import PREFIX

NOTHING = "nothing"
LONGEST_REQUEST_S = 1.0
"""Longest allowed request: longer requests rarely lie entirely inside a window."""
LEAST_SWITCH_S = 2.0
BEFORE_THE_FIRST_S = 3.0
"""Time for a load process to start."""
WARM_UP_PROMPTS = 8
LOOK_S = 0.2
LAST_ANSWERS_S = 60.0


@dataclass(frozen=True)
class Alternation:
    """An alternation between the usual state and a changed state.

    The changed state has a fault, or a setting, or (for A/A) neither. switch_s: duration of a
    window. alternations: number of switches. what: the state as given by the user. usual: a setting
    of the usual state; None: the defaults.
    """

    what: str
    switch_s: float
    alternations: int
    fault: Fault | None = None
    setting: tuple[str, str] | None = None
    usual: tuple[str, str] | None = None

    @classmethod
    def of(
        cls, what: str, *, switch_s: float, alternations: int, usual: str | None = None
    ) -> Alternation:
        """Parses the state given by the user, and the setting of the usual state.

        Raises:
            ScheduleError: ``what`` is neither ``nothing``, nor a fault, nor a setting, or is no
                setting although ``usual`` is given.
            ConfigError: the option of r2serve is unknown, or has an invalid value.
        """
        if "=" in what:
            beside = None if usual is None else _setting(usual)
            return cls(what, switch_s, alternations, setting=_setting(what), usual=beside)
        if usual is not None:
            raise ScheduleError(
                f"usual is {usual!r}, and alternate is {what!r}: alternate must be a setting, too, "
                "because a setting needs an engine of its own"
            )
        if what == NOTHING:
            return cls(what, switch_s, alternations)
        try:
            (fault,) = parse(f"at: {switch_s:g}s, {what}, for: {switch_s:g}s")
        except ValueError as error:
            raise ScheduleError(
                f"alternate is {what!r}: must be `{NOTHING}`, a fault such as "
                f"`carrier_loss: rail0@node1`, or a setting such as `R2CCL_FALLBACK=off` ({error})"
            ) from error
        if fault.rail is Aim.IN_USE:
            raise ScheduleError(
                f"alternate is {what!r}: the rail must have a number, as in "
                "`carrier_loss: rail0@node1`; the rail in use may change from switch to switch"
            )
        return cls(what, switch_s, alternations, fault=fault)

    @property
    def seconds(self) -> float:
        """Duration of all windows; the number of windows is the number of switches plus 1."""
        return self.switch_s * (self.alternations + 1)

    def faults(self) -> tuple[Fault, ...]:
        """Returns the faults of all changed windows, in order; empty without a fault."""
        if self.fault is None:
            return ()
        return tuple(
            dataclasses.replace(self.fault, at_s=self.switch_s * index)
            for index in range(1, self.alternations + 1, 2)
        )


def _setting(text: str) -> tuple[str, str]:
    """Parses ``NAME=VALUE``. Raises ConfigError for an unknown option, or an invalid value."""
    name, _, value = text.partition("=")
    known = [f"{PREFIX}{field.name.upper()}" for field in dataclasses.fields(Config)]
    if name not in known:
        raise ConfigError(f"{name} is no option of r2serve: `r2serve config` lists all")
    Config.from_env({name: value})
    return name, value


@dataclass(frozen=True)
class AlternationOutcome:
    """Result of a run.

    e2e_s: median end-to-end latency of all requests.  serves: the commands of the engines.
    """

    compared: Compared
    failed: int
    e2e_s: float
    serves: str

    def as_row(self, alternation: Alternation, contender: str) -> dict[str, Any]:
        return {
            "alternate": alternation.what,
            "usual": None if alternation.usual is None else "=".join(alternation.usual),
            "contender": contender,
            "switch_s": alternation.switch_s,
            "alternations": alternation.alternations,
            "serves": self.serves,
            "failed": self.failed,
            "e2e_p50_s": round(self.e2e_s, 4),
            **asdict(self.compared),
        }


def run(
    alternation: Alternation,
    contender: str,
    workload: Workload,
    progress: Progress,
    *,
    keep_logs: Path | None = None,
) -> AlternationOutcome:
    """Starts the engines, alternates the states and compares both states.

    Raises:
        AlternationError: requests last longer than ``LONGEST_REQUEST_S``, or too few windows can
            be compared.
        LabUnavailableError, ServeError, LoadError: the lab, a server or the load failed.
    """
    labs.sweep()
    workdir.sweep()
    with workdir.work_directory(keep_logs) as work, contextlib.ExitStack() as stack:
        model = make_tiny_llama(work / "model")
        settings = [
            dict([each]) for each in (alternation.usual, alternation.setting) if each is not None
        ]
        if alternation.usual is None:
            settings.insert(0, {})
        places = [
            stack.enter_context(
                ContenderServer(
                    contender,
                    model,
                    work,
                    workload.concurrency,
                    progress.detail,
                    settings=each,
                    label=f"{contender}-{index}",
                )
            )
            for index, each in enumerate(settings)
        ]
        for place in places:
            with progress.step(f"starting {place.command}"):
                place.server(workload.prompts[:WARM_UP_PROMPTS])
                place.settle()
                _check_length(place, workload, work)
        with progress.step(f"{alternation.alternations} switches, {alternation.seconds:.0f} s"):
            return _Alternating(alternation, places, workload, work, progress).run()


def _check_length(place: ContenderServer, workload: Workload, work: Path) -> None:
    tokens = workload.tokens[0]
    prompts = workload.prompts[: workload.concurrency]
    server = place.server(prompts)
    trial = Load(server.client, server.url, prompts, tokens, work / "trial.json")
    e2e_s = median_e2e_s(trial.finish(LAST_ANSWERS_S, server.check_alive).requests)
    if e2e_s > LONGEST_REQUEST_S:
        raise AlternationError(
            f"requests of {tokens} tokens last {e2e_s:.2f} s: must be at most "
            f"{LONGEST_REQUEST_S:g} s; give fewer --output-tokens, or a lower --concurrency"
        )


def median_e2e_s(requests: Sequence[Request]) -> float:
    lasted = [each.times_ns[-1] - each.sent_ns for each in requests if each.completed]
    if not lasted:
        raise LoadError("no request completed")
    return statistics.median(lasted) / 1e9


class _Alternating:
    """A run: a load for each engine, and the faults of the changed windows."""

    def __init__(
        self,
        alternation: Alternation,
        places: Sequence[ContenderServer],
        workload: Workload,
        work: Path,
        progress: Progress,
    ) -> None:
        self._alternation = alternation
        self._places = places
        self._workload = workload
        self._work = work
        self._progress = progress

    def run(self) -> AlternationOutcome:
        begin_ns = time.monotonic_ns() + int(BEFORE_THE_FIRST_S * 1e9)
        end_ns = begin_ns + int(self._alternation.seconds * 1e9)
        loads = [
            self._load(index, place, begin_ns, end_ns) for index, place in enumerate(self._places)
        ]
        try:
            first = self._places[0]
            faults = self._alternation.faults()
            with strikes(first.lab, faults, lambda: begin_ns, first.rail_in_use) as play:
                runs = self._follow(loads, end_ns)
        finally:
            for load in loads:
                load.stop()
        changes = [ns for each in play.played for ns in (each.struck_ns, each.healed_ns) if ns]
        requests = [request for each in runs for request in each.requests]
        windows = self._windows(begin_ns, end_ns, changes)
        return AlternationOutcome(
            compare(requests, windows),
            sum(each.failed for each in runs),
            median_e2e_s(requests),
            "; ".join(place.command for place in self._places),
        )

    def _load(self, index: int, place: ContenderServer, begin_ns: int, end_ns: int) -> Load:
        """Starts the load of an engine; of two engines, each gets every second window."""
        server = place.server(self._workload.prompts[:WARM_UP_PROMPTS])
        window_ns = int(self._alternation.switch_s * 1e9)
        return Load(
            server.client,
            server.url,
            self._workload.prompts,
            self._workload.tokens,
            self._work / f"alternate-{index}.json",
            self._workload.concurrency,
            turns=Turns(
                begin_ns,
                end_ns,
                period_ns=window_ns * len(self._places),
                first_ns=window_ns * index,
                last_ns=window_ns * (index + 1),
            ),
        )

    def _follow(self, loads: Sequence[Load], end_ns: int) -> list[Run]:
        while any(load.running for load in loads):
            for place in self._places:
                place.server(self._workload.prompts[:WARM_UP_PROMPTS]).check_alive()
            left_s = (end_ns - time.monotonic_ns()) / 1e9
            self._progress.detail(f"{max(0.0, left_s):.0f} s left")
            if left_s < -LAST_ANSWERS_S:
                raise LoadError(f"requests still unanswered {LAST_ANSWERS_S:.0f} s after the end")
            time.sleep(LOOK_S)
        return [load.result(timeout_s=10) for load in loads]

    def _windows(self, begin_ns: int, end_ns: int, changes: Sequence[int]) -> list[StateWindow]:
        """Returns the windows between actual fault times; without a fault, as planned."""
        if self._alternation.fault is not None:
            return windows_of(begin_ns, [each for each in changes if each < end_ns], end_ns)
        window_ns = int(self._alternation.switch_s * 1e9)
        planned = [begin_ns + window_ns * i for i in range(1, self._alternation.alternations + 1)]
        return windows_of(begin_ns, planned, end_ns)
