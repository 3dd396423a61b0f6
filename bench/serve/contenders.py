"""Contenders: ways to serve the same model over the same two nodes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

from r2serve.bench.serve import step_recorder, worker_gaps
from r2serve.bench.serve.networks import Multipath, Network, Plain, VirtualAddress
from r2serve.lab.lab import Lab
from r2serve.lab.rails import rail_index, wait_until
from r2serve.lab.serving.client import Load, Run
from r2serve.lab.serving.journals import Journals
from r2serve.lab.serving.places import LabPlace
from r2serve.lab.serving.plan import Plan, ServeError
from r2serve.lab.serving.serve import Server

NODES = 2
RAILS = 2
WARM_UP_TOKENS = 48
LOOK_S = 0.1
REJOIN_TIMEOUT_S = 30.0
# The supervisor restarts an engine without a token for this time while requests are under way.
SUPERVISOR_S = 5.0
MAX_RESTARTS = 3


@dataclass(frozen=True)
class ServeContender:
    """A way to serve.

    meaning: short description for --help. network: configuration of the lab's network.
    renew: a new engine starts after a run with faults. Needed if connections do not recover a lost
    rail, or if the engine has moved to another rail. supervised: a silent engine is restarted on
    the next rail, and clients repeat failed requests. settings: further environment variables.
    """

    meaning: str
    r2ccl: bool = False
    network: Network = field(default_factory=Plain)
    renew: bool = False
    supervised: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)


CONTENDERS = {
    "r2ccl": ServeContender("r2ccl, over both rails", r2ccl=True),
    "gloo": ServeContender("the engine's own communicator on CPUs, over rail0"),
    "ecmp": ServeContender(
        "gloo over a virtual address, with BFD-monitored routes over both rails",
        network=VirtualAddress(),
    ),
    "mptcp": ServeContender(
        "gloo over Multipath TCP",
        network=Multipath(),
        renew=True,
    ),
    "restart": ServeContender(
        "gloo with a supervisor that restarts the engine on the other rail; clients retry",
        renew=True,
        supervised=True,
    ),
    "r2ccl-rails": ServeContender(
        "r2ccl without the fallback to the management NIC",
        r2ccl=True,
        settings={"R2CCL_FALLBACK": "off"},
    ),
}


class ContenderServer:
    """A contender's lab and server; a context manager. The server is restarted when needed.

    watch: receives the progress of a start. settings: environment variables in addition to the
    contender's. label: name of the files in ``work``; None: the contender's name. engine: see
    :class:`r2serve.lab.serving.plan.Plan`. management_rail: see
    :class:`r2serve.lab.serving.places.LabPlace`. records_steps: the engine's processes record the
    ends of their steps, see :mod:`r2serve.bench.serve.worker_gaps`.
    """

    def __init__(
        self,
        name: str,
        model: Path,
        work: Path,
        streams: int,
        watch: Callable[[str], None],
        *,
        settings: Mapping[str, str] | None = None,
        label: str | None = None,
        engine: str = "vllm",
        management_rail: int | None = None,
        records_steps: bool = False,
    ) -> None:
        self.name = name
        self.contender = CONTENDERS[name]
        self.label = label or name
        self._work = work
        self._management_rail = management_rail
        of_rail = _settings_without_management_nic(management_rail) if self.contender.r2ccl else {}
        self._plan = Plan(
            label=self.label,
            model=model,
            r2ccl=self.contender.r2ccl,
            lab=True,
            work=work,
            max_requests=streams,
            settings={**of_rail, **self.contender.settings, **(settings or {})},
            engine=engine,
        )
        self._records_steps = records_steps
        self._watch = watch
        # A further node runs the clients: faults strike only the serving nodes.
        self.lab = Lab(nodes=NODES + 1, rails=RAILS)
        self._server: Server | None = None
        self.starts = 0
        self._rail = 0
        self.restarts = 0
        """Number of restarts by the supervisor during the last run."""

    def __enter__(self) -> ContenderServer:
        self.lab.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        self.lab.close()

    @property
    def records(self) -> Path:
        """Folder of the records of the engine's steps."""
        return self._work / f"{self.label}-records"

    @property
    def command(self) -> str:
        """The started command, for repeating the run by hand."""
        measuring = (step_recorder.FOLDER, "PYTHONPATH")
        settings = [each for each in self._plan.settings.items() if each[0] not in measuring]
        words = [f"{name}={Path(value).name}" for name, value in settings]  # files without folder
        words.append(f"{self._plan.engine} serve tiny-llama --tensor-parallel-size 2 --nnodes 2")
        if self.contender.r2ccl:
            words.append("--distributed-backend r2ccl")
        return " ".join(words)

    def stop(self) -> None:
        if self._server is not None:
            self._server.__exit__(None, None, None)
        self._server = None

    def server(self, warm_up: Sequence[str]) -> Server:
        """Returns the running server, or starts and warms up a new server.

        Raises ServeError or LoadError when no server can be started.
        """
        if self._server is not None:
            try:
                self._server.check_alive()
            except ServeError:
                self.stop()
        if self._server is not None:
            return self._server
        self._rail = 0
        if self.starts == 0:
            of_network = self.contender.network.build(self.lab, self._work)
            of_steps = worker_gaps.variables(self.records) if self._records_steps else {}
            self._plan = replace(
                self._plan, settings={**self._plan.settings, **of_network, **of_steps}
            )
        started = self._start(self._plan)
        try:
            # The first requests compile kernels.
            for turn in range(2):
                started.stream(
                    warm_up, WARM_UP_TOKENS, f"warm-up-{self.starts}-{turn}", self._watch
                )
        except BaseException:
            self.stop()
            raise
        return started

    def restart(self) -> None:
        """Restarts a hung engine on the next rail, like a supervisor."""
        self.stop()
        self._rail = (self._rail + 1) % RAILS
        rail = {"GLOO_SOCKET_IFNAME": f"rail{self._rail}"}
        self._start(replace(self._plan, settings={**self._plan.settings, **rail}))

    def _start(self, plan: Plan) -> Server:
        self.starts += 1
        self.contender.network.begin(self.lab, self._work)
        *nodes, clients = (LabPlace(node, self._management_rail) for node in self.lab.nodes)
        self._server = Server(plan, nodes, clients).__enter__()
        try:
            self._server.wait_until_ready(lambda s: self._watch(f"{self.name}: {s:.0f} s"))
        except BaseException:
            self.stop()
            raise
        return self._server

    def rail_in_use(self) -> int:
        """Returns the rail that currently carries most bytes."""
        before = self._sent_bytes()
        time.sleep(LOOK_S)
        sent = [after - then for then, after in zip(before, self._sent_bytes(), strict=True)]
        return sent.index(max(sent))

    def _sent_bytes(self) -> list[int]:
        """Returns the bytes sent so far by both nodes, by rail."""
        sent = [0] * RAILS
        for node in self.lab.nodes[:NODES]:
            for link in json.loads(node.run("ip", "-json", "-statistics", "link", "show")):
                if link["ifname"].startswith("rail"):
                    sent[rail_index(link["ifname"])] += link["stats64"]["tx"]["bytes"]
        return sent

    def settle(self) -> None:
        """Waits until all rails are UP under r2ccl; other contenders do not report rails."""
        if self._server is None or not self.contender.r2ccl:
            return
        journals = Journals(self._server.journals())
        wait_until(journals.all_up, REJOIN_TIMEOUT_S, LOOK_S)

    def finish(self, load: Load, patience_s: float, watch: Callable[[str], None]) -> Run:
        """Waits for the end of a load and returns the run.

        Requests under way have failed when no token arrives for ``patience_s``. Raises LoadError
        when the load itself fails, and ServeError when a restart fails.
        """
        self.restarts = 0

        def look() -> None:
            watch(how_far(load))
            why = self._why_restart(load)
            if why is None:
                return
            if not self.contender.supervised or self.restarts == MAX_RESTARTS:
                load.stop()
                return
            self.restarts += 1
            watch(f"engine restarted: {why}")
            self.restart()
            load.changed_at = time.monotonic()

        try:
            return load.finish(patience_s, look)
        except BaseException:
            load.stop()
            raise

    def _why_restart(self, load: Load) -> str | None:
        if self.contender.supervised and load.silent_s > SUPERVISOR_S:
            return f"no token for {SUPERVISOR_S:.0f} s"
        assert self._server is not None
        try:
            self._server.check_alive()
        except ServeError as error:
            return str(error)
        return None


def _settings_without_management_nic(rail: int | None) -> dict[str, str]:
    """Returns variables of r2ccl where this rail carries control traffic; None: no variables."""
    if rail is None:
        return {}
    return {
        "GLOO_SOCKET_IFNAME": f"rail{rail}",
        "R2CCL_MANAGEMENT": "",
        "R2CCL_RAILS": ",".join(f"rail{each}" for each in range(RAILS)),
    }


def how_far(load: Load) -> str:
    """Returns a progress bar with the number of completed requests."""
    done, expected = load.finished, load.expected_requests
    return f"{bar(done / expected)} {done} of {expected} requests"


def bar(part: float, width: int = 20) -> str:
    """Returns a progress bar of ``width`` characters for ``part`` (0 to 1)."""
    done = round(width * max(0.0, min(part, 1.0)))
    return "━" * done + "╌" * (width - done)
