"""Who serves: ways to run the same model over the same two nodes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

from r2serve.bench.serve.networks import Multipath, Network, Plain, VirtualAddress
from r2serve.lab.lab import Lab
from r2serve.lab.serving.client import Load, Run
from r2serve.lab.serving.journals import Journals
from r2serve.lab.serving.places import LabPlace
from r2serve.lab.serving.serve import Plan, ServeError, Server

NODES = 2
RAILS = 2
WARM_UP_TOKENS = 48
LOOK_S = 0.1
REJOIN_TIMEOUT_S = 30.0
# A supervisor restarts an engine of which no token came for so long, with requests under way.
SUPERVISOR_S = 5.0
MAX_RESTARTS = 3


@dataclass(frozen=True)
class ServeContender:
    """meaning: in a word, for --help. network: what the lab needs.

    renew: after a run with faults the next one begins with a new engine, where connections do not
    get back what they have lost, or the engine is not where it was. supervised: an engine that is
    silent is restarted, on the next rail, and clients send their requests again. settings: further
    environment variables.
    """

    meaning: str
    r2ccl: bool = False
    network: Network = field(default_factory=Plain)
    renew: bool = False
    supervised: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)


CONTENDERS = {
    "r2ccl": ServeContender("our communicator, over both rails", r2ccl=True),
    "gloo": ServeContender("vLLM's own on CPUs, over rail0"),
    "ecmp": ServeContender(
        "gloo over a virtual address, with routes over both rails that BFD watches",
        network=VirtualAddress(),
    ),
    "mptcp": ServeContender(
        "gloo over Multipath TCP",
        network=Multipath(),
        renew=True,
    ),
    "restart": ServeContender(
        "gloo with a supervisor that restarts it on the other rail, and clients that try again",
        renew=True,
        supervised=True,
    ),
    "r2ccl-rails": ServeContender(
        "r2ccl that never goes over the management NIC",
        r2ccl=True,
        settings={"R2CCL_FALLBACK": "off"},
    ),
}


class ContenderServer:
    """A contender's own lab, and its server as often as one is needed; a context manager.

    watch: is told how far a start has come. settings: environment variables beyond the contender's.
    label: names the files in ``work``; None: as the contender.
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
    ) -> None:
        self.name = name
        self.contender = CONTENDERS[name]
        self._work = work
        self._plan = Plan(
            label=label or name,
            model=model,
            r2ccl=self.contender.r2ccl,
            lab=True,
            work=work,
            max_requests=streams,
            settings={**self.contender.settings, **(settings or {})},
        )
        self._watch = watch
        # One more than serve: clients stay whatever happens to those.
        self.lab = Lab(nodes=NODES + 1, rails=RAILS)
        self._server: Server | None = None
        self.starts = 0
        self._rail = 0
        self.restarts = 0
        """By the supervisor, during the last run."""

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
    def command(self) -> str:
        """What was started, for whoever wants to repeat it."""
        settings = self._plan.settings.items()
        words = [f"{name}={Path(value).name}" for name, value in settings]  # of a file, its name
        words.append("vllm serve tiny-llama --tensor-parallel-size 2 --nnodes 2")
        if self.contender.r2ccl:
            words.append("--distributed-backend r2ccl")
        return " ".join(words)

    def stop(self) -> None:
        if self._server is not None:
            self._server.__exit__(None, None, None)
        self._server = None

    def server(self, warm_up: Sequence[str]) -> Server:
        """One that answers: the one that runs, or a new one, warmed up.

        Raises ServeError or LoadError where none can be had.
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
            self._plan = replace(self._plan, settings={**self._plan.settings, **of_network})
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
        """What a supervisor does with an engine that hangs: a new one, on the next rail."""
        self.stop()
        self._rail = (self._rail + 1) % RAILS
        rail = {"GLOO_SOCKET_IFNAME": f"rail{self._rail}"}
        self._start(replace(self._plan, settings={**self._plan.settings, **rail}))

    def _start(self, plan: Plan) -> Server:
        self.starts += 1
        self.contender.network.begin(self.lab, self._work)
        *nodes, clients = (LabPlace(node) for node in self.lab.nodes)
        self._server = Server(plan, nodes, clients).__enter__()
        try:
            self._server.wait_until_ready(lambda s: self._watch(f"{self.name}: {s:.0f} s"))
        except BaseException:
            self.stop()
            raise
        return self._server

    def rail_in_use(self) -> int:
        """The rail over which nodes send most now."""
        before = self._sent_bytes()
        time.sleep(LOOK_S)
        sent = [after - then for then, after in zip(before, self._sent_bytes(), strict=True)]
        return sent.index(max(sent))

    def _sent_bytes(self) -> list[int]:
        """By rail, of both nodes."""
        sent = [0] * RAILS
        for node in self.lab.nodes[:NODES]:
            for link in json.loads(node.run("ip", "-json", "-statistics", "link", "show")):
                if link["ifname"].startswith("rail"):
                    rail = int(link["ifname"].removeprefix("rail"))
                    sent[rail] += link["stats64"]["tx"]["bytes"]
        return sent

    def settle(self) -> None:
        """Waits until all rails are back, where that can be asked."""
        if self._server is None or not self.contender.r2ccl:
            return
        journals = Journals(self._server.journals())
        deadline = time.monotonic() + REJOIN_TIMEOUT_S
        while not journals.all_up() and time.monotonic() < deadline:
            time.sleep(LOOK_S)

    def finish(self, load: Load, patience_s: float, watch: Callable[[str], None]) -> Run:
        """The run when it is over: who waits for a token longer than ``patience_s`` has failed.

        Raises LoadError where the load itself broke, ServeError where a restart fails.
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
            watch(f"restarted: {why}")
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


def how_far(load: Load) -> str:
    """A bar, and how many requests have been answered."""
    done, expected = load.finished, load.expected_requests
    return f"{bar(done / expected)} {done} of {expected} requests"


def bar(part: float, width: int = 20) -> str:
    """What is done of a whole, as a row of characters."""
    done = round(width * max(0.0, min(part, 1.0)))
    return "━" * done + "╌" * (width - done)
