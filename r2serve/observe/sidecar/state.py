"""Shared state of the sidecar's routes: the watch, and a cache of rendered answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from pydantic import BaseModel

from r2serve.observe.health import STUCK_S, Judge, engines
from r2serve.observe.requests import Requests
from r2serve.observe.sidecar.health_log import HealthLog
from r2serve.observe.sidecar.metrics import Metrics
from r2serve.observe.sidecar.peers import Peers
from r2serve.observe.sidecar.responses import as_json
from r2serve.observe.sidecar.schema import HealthView
from r2serve.observe.sidecar.streams import Streams
from r2serve.observe.watch import Watch

LOOK_S = 0.05
"""Polling interval of the journals, s."""
LOG_S = 0.5
"""Interval of looks at the health for the log, s."""


class State:
    """The watch, the metrics, and answers rendered since the last look."""

    def __init__(self, watch: Watch, peers: Peers, stuck_s: float = STUCK_S) -> None:
        self.watch = watch
        self.peers = peers
        self.requests = Requests(watch.folder, engine=watch.engine)
        self.health = Judge(watch, stuck_s)
        self.metrics = Metrics(watch, peers, self.requests, self.health)
        self.streams = Streams()
        self._health_log = HealthLog()
        self._health_logged_s = 0.0
        self._journals_read = False
        self._rendered: dict[str, bytes] = {}
        self._news = asyncio.Event()

    async def poll(self) -> None:
        """Polls the journals every LOOK_S until cancelled, or until a look raises."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def failed(self, why: str) -> None:
        """Answers that nothing is known of the node, if the last look read no journals."""
        if not self._journals_read:
            self.health.failed(why)
        self._rendered.clear()

    def look(self) -> None:
        """Reads the journals and wakes the streams."""
        self._journals_read = False
        new = self.watch.look()
        self._journals_read = True
        self.health.looked()
        self.metrics.take(new)
        self.metrics.take_requests(self.requests.look())
        self._rendered.clear()
        self._log_health()
        if new:
            self.wake()

    def _log_health(self) -> None:
        now_s = time.monotonic()
        if now_s - self._health_logged_s >= LOG_S:
            self._health_logged_s = now_s
            self._health_log.take(self.health(), now_s)

    def wake(self) -> None:
        """Wakes the streams."""
        self._news.set()
        self._news = asyncio.Event()

    async def news(self) -> None:
        """Returns as soon as new events have arrived, or after :meth:`wake`."""
        await self._news.wait()

    def health_view(self, engine: str | None = None, *, details: bool = False) -> HealthView:
        """Returns the health of the node, or of a serving engine, with that of each engine.

        details: with the ends of rails that each reason touches.
        """
        names = engines(self.watch) if engine is None else []
        return HealthView.of(
            self.health(engine),
            {name: self.health(name).status for name in names},
            details=details,
        )

    def known(self, name: str) -> bytes | None:
        """Returns an answer rendered since the last look, else None."""
        return self._rendered.get(name)

    def rendered(self, name: str, make: Callable[[], bytes | BaseModel]) -> bytes:
        """Returns the cached answer, or renders and caches the result of ``make``."""
        if name not in self._rendered:
            made = make()
            self._rendered[name] = made if isinstance(made, bytes) else as_json(made)
        return self._rendered[name]
