"""Who serves: ways to run the same model over the same two nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from r2serve.demo.client import Load, LoadError, Run
from r2serve.demo.faults import Journals, rail_in_use
from r2serve.demo.places import LabPlace
from r2serve.demo.serve import Plan, ServeError, Server
from r2serve.drills.lab import Lab

NODES = 2
RAILS = 2
WARM_UP_TOKENS = 48
LOOK_S = 0.1
REJOIN_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Contender:
    """meaning: in a word, for --help. settings: further environment variables of the server."""

    meaning: str
    r2ccl: bool
    settings: Mapping[str, str] = field(default_factory=dict)


CONTENDERS = {
    "r2ccl": Contender("our communicator, over both rails", r2ccl=True),
    "gloo": Contender("vLLM's own on CPUs, over rail0", r2ccl=False),
}


class Place:
    """A contender's own lab, and its server as often as one is needed; a context manager.

    watch: is told how far a start has come.
    """

    def __init__(
        self, name: str, model: Path, work: Path, streams: int, watch: Callable[[str], None]
    ) -> None:
        self.name = name
        self._contender = CONTENDERS[name]
        self._plan = Plan(
            label=name,
            model=model,
            r2ccl=self._contender.r2ccl,
            lab=True,
            work=work,
            max_requests=streams,
            settings=self._contender.settings,
        )
        self._watch = watch
        self.lab = Lab(nodes=NODES, rails=RAILS)
        self._server: Server | None = None
        self.starts = 0

    def __enter__(self) -> Place:
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
        backend = " --distributed-backend r2ccl" if self._contender.r2ccl else ""
        settings = "".join(f"{name}={value} " for name, value in self._contender.settings.items())
        return f"{settings}vllm serve tiny-llama --tensor-parallel-size 2 --nnodes 2{backend}"

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
        if self._server is None:
            self.starts += 1
            started = Server(self._plan, [LabPlace(node) for node in self.lab.nodes])
            self._server = started.__enter__()
            try:
                started.wait_until_ready(lambda s: self._watch(f"{self.name}: {s:.0f} s"))
                # The first requests compile kernels.
                for turn in range(2):
                    started.stream(
                        warm_up, WARM_UP_TOKENS, f"warm-up-{self.starts}-{turn}", self._watch
                    )
            except BaseException:
                self.stop()
                raise
        return self._server

    def rail_in_use(self) -> int:
        """The rail that carries most now; rail 0 where nobody says."""
        if self._server is None or not self._contender.r2ccl:
            return 0
        journals = Journals(self._server.journals())
        before = journals.sent_bytes()
        time.sleep(LOOK_S)
        used = rail_in_use(before, journals.sent_bytes())
        return 0 if used is None else used[0]

    def settle(self) -> None:
        """Waits until all rails are back, where that can be asked."""
        if self._server is None or not self._contender.r2ccl:
            return
        journals = Journals(self._server.journals())
        deadline = time.monotonic() + REJOIN_TIMEOUT_S
        while not journals.all_up() and time.monotonic() < deadline:
            time.sleep(LOOK_S)


def finish(load: Load, server: Server, patience_s: float, watch: Callable[[str], None]) -> Run:
    """The run when it is over: what waits for a token for longer than ``patience_s`` has failed."""

    def look() -> None:
        watch(f"{load.finished} of {load.streams} requests, {load.tokens} tokens")
        try:
            server.check_alive()
        except ServeError:
            load.stop()

    try:
        return load.finish(patience_s, look)
    except LoadError:
        load.stop()
        raise
