"""What all routes of a sidecar share: the watch, and what was rendered of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pydantic import BaseModel

from r2serve.observe import health
from r2serve.observe.requests import Requests
from r2serve.observe.sidecar.metrics import Metrics
from r2serve.observe.sidecar.peers import Peers
from r2serve.observe.sidecar.responses import as_json
from r2serve.observe.watch import Watch

LOOK_S = 0.05
"""How often journals are read."""
_LOG = logging.getLogger("r2serve.sidecar")


class State:
    """The watch and what was rendered of it since it last looked."""

    def __init__(self, watch: Watch, stuck_s: float, peers: Peers) -> None:
        self.watch = watch
        self.peers = peers
        self.requests = Requests(watch.folder)
        self.stuck_s = stuck_s
        self.metrics = Metrics(watch, peers, self.requests)
        self.streams = 0
        self._rendered: dict[str, bytes] = {}
        self._news = asyncio.Event()

    async def follow(self) -> None:
        """Look again and again, for ever."""
        while True:
            try:
                self.look()
            except Exception:  # noqa: BLE001  what went wrong once may go right the next time
                _LOG.exception("%s could not be read", self.watch.folder)
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Read the journals and wake the streams."""
        new = self.watch.look()
        self.metrics.take(new)
        self.metrics.take_requests(self.requests.look())
        self._rendered.clear()
        if new:
            self._news.set()
            self._news = asyncio.Event()

    async def news(self) -> None:
        """Return when there are new events."""
        await self._news.wait()

    def health(self) -> health.Health:
        return health.examine(self.watch, self.stuck_s)

    def known(self, name: str) -> bytes | None:
        """What was rendered since the last look."""
        return self._rendered.get(name)

    def rendered(self, name: str, make: Callable[[], bytes | BaseModel]) -> bytes:
        """What ``make`` gives, made once for all who ask between two looks."""
        if name not in self._rendered:
            made = make()
            self._rendered[name] = made if isinstance(made, bytes) else as_json(made)
        return self._rendered[name]
