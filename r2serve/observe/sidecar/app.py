"""The sidecar's HTTP interface."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

from fastapi import FastAPI, Header, Query, Response
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

from r2serve.observe import health
from r2serve.observe.requests import Requests
from r2serve.observe.sidecar import schema
from r2serve.observe.sidecar.answers import SECURITY, as_json, respond
from r2serve.observe.sidecar.auth import Guard
from r2serve.observe.sidecar.drills import add_drills
from r2serve.observe.sidecar.metrics import Metrics
from r2serve.observe.sidecar.peers import Peers, add_cluster
from r2serve.observe.sidecar.requests import add_requests
from r2serve.observe.watch import Told, Watch

LOOK_S = 0.05
"""How often journals are read."""
MAX_STREAMS = 64
PING_S = 15
SEND_S = 30
"""A client of the stream that takes nothing for so long is left."""
MAX_PAGE = 1000
BATCH = 100
"""Events that a stream sends at once."""

_LOG = logging.getLogger("r2serve.sidecar")

Kind = Literal["rail_state", "verdict", "speed", "stall", "replay", "hedge", "abort", "injected"]

_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_CSP = "Content-Security-Policy"


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


def make_app(
    watch: Watch,
    *,
    stuck_s: float = health.STUCK_S,
    token: str | None = None,
    peers: Sequence[str] = (),
) -> FastAPI:
    """The application; it looks at the watch while it runs.

    Args:
        watch: of the folder with the workers' journals.
        stuck_s: a collective that takes longer makes ``/readyz`` answer 503.
        token: who has it may start drills; None: nobody may.
        peers: addresses of other nodes' sidecars.

    Raises:
        PeerError: one of them is none.
    """
    state = State(watch, stuck_s, Peers(peers))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        state.look()
        following = [
            asyncio.create_task(state.follow()),
            asyncio.create_task(state.peers.follow()),
        ]
        yield
        for task in following:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        state.requests.close()

    app = FastAPI(
        title="r2serve sidecar",
        summary="Rails, failovers and what they cost, of the workers of this node.",
        version=version("r2serve"),
        lifespan=lifespan,
        docs_url=None,  # its page is made of other people's scripts
        redoc_url=None,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
    )
    app.state.sidecar = state
    app.add_middleware(Guard, token=token)
    _add_probes(app, state)
    _add_views(app, state)
    _add_events(app, state)
    add_requests(app, state)
    add_drills(app, state)
    add_cluster(app, state)
    _add_dashboard(app)
    return app


def _add_probes(app: FastAPI, state: State) -> None:
    @app.get(
        "/livez", tags=["probes"], response_class=Response, responses=_text("The sidecar runs.")
    )
    async def livez() -> Response:
        """Whether this sidecar runs: always, whatever the engine does."""
        return respond(b"ok\n", "text/plain")

    @app.get(
        "/readyz",
        tags=["probes"],
        response_model=schema.HealthView,
        responses={503: {"model": schema.HealthView, "description": "Requests are not served."}},
    )
    async def readyz() -> Response:
        """Whether requests are served: also while rails are lost, as long as one is left to each
        peer and no collective is stuck."""
        found = state.health()
        return respond(schema.HealthView.of(found), status=200 if found.ready else 503)

    @app.get("/health", tags=["probes"], response_model=schema.HealthView)
    async def healthy() -> Response:
        """The same for people: always 200, what is wrong is said."""
        return respond(schema.HealthView.of(state.health()))

    @app.get("/metrics", tags=["probes"], response_class=Response, responses=_text("Metrics."))
    async def metrics() -> Response:
        """Prometheus' text format."""
        return respond(state.rendered("metrics", state.metrics.render), _PROMETHEUS)


def _add_views(app: FastAPI, state: State) -> None:
    @app.get("/v1/rails", tags=["rails"], response_model=schema.RailsView)
    async def rails() -> Response:
        """Each end of each rail that a running worker has."""
        return respond(state.rendered("rails", lambda: schema.RailsView.of(state.watch)))

    @app.get("/v1/collectives", tags=["collectives"], response_model=schema.CollectivesView)
    async def collectives() -> Response:
        """How long collectives take, of each communicator of each running worker."""
        return respond(
            state.rendered("collectives", lambda: schema.CollectivesView.of(state.watch))
        )

    @app.get("/v1/topology", tags=["rails"], response_model=schema.TopologyView)
    async def topology() -> Response:
        """The workers of this node, also those that have ended."""
        return respond(state.rendered("topology", lambda: schema.TopologyView.of(state.watch)))


def _add_events(app: FastAPI, state: State) -> None:
    watch = state.watch

    @app.get("/v1/events", tags=["events"], response_model=schema.EventsView)
    async def events(
        after: Annotated[int, Query(ge=0, le=2**62, description="Only later ones than this.")] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
        kind: Annotated[Kind | None, Query(description="Only of this kind.")] = None,
    ) -> Response:
        """What happened, a page at a time."""
        found, reached = _page(watch.after(after), limit, kind)
        return respond(
            schema.EventsView(
                events=[schema.EventView.of(told) for told in found],
                next=max(after, watch.last_id if reached is None else reached),
                first_kept=watch.events[0].id if watch.events else 0,
            )
        )

    @app.get(
        "/v1/events/stream",
        tags=["events"],
        response_class=Response,
        responses={
            200: {
                "description": "Server-sent events: of each event its id, its kind, and as data "
                "what /v1/events says of it.",
                "content": {"text/event-stream": {"schema": {"type": "string"}}},
            },
            503: {"description": f"There are {MAX_STREAMS} streams already."},
        },
    )
    async def stream(
        after: Annotated[
            int | None,
            Query(ge=0, le=2**62, description="Begin after this one; default: with news."),
        ] = None,
        last_event_id: Annotated[str | None, Header(max_length=32)] = None,
    ) -> Response:
        """What happens, as it happens.

        A client that was cut off goes on after its Last-Event-ID.  One that is too slow misses what
        is no longer kept when its turn comes: as little as possible is lost, and no memory held.
        """
        if state.streams >= MAX_STREAMS:
            return Response(status_code=503)
        begin = watch.last_id if after is None else after
        if last_event_id is not None and last_event_id.isascii() and last_event_id.isdigit():
            begin = int(last_event_id)
        return _Stream(_follow(state, begin), headers=SECURITY, ping=PING_S, send_timeout=SEND_S)


def _add_dashboard(app: FastAPI) -> None:
    folder = Path(__file__).parent / "static"
    app.mount("/static", StaticFiles(directory=folder))

    @app.get("/", include_in_schema=False)
    async def dashboard() -> FileResponse:
        return FileResponse(
            folder / "index.html", headers=SECURITY | {_CSP: "default-src 'self'; img-src data:"}
        )


class _Stream(EventSourceResponse):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            _LOG.warning("left a client of the stream that took nothing for %g s", SEND_S)


async def _follow(state: State, last: int) -> AsyncIterator[bytes]:
    """Holds nothing for its client but the id of the last event: what follows is the watch's."""
    state.streams += 1
    try:
        while True:
            found = state.watch.after(last)[:BATCH]
            if not found:
                await state.news()
                continue
            last = found[-1].id
            yield b"".join(map(_message, found))
    finally:
        state.streams -= 1


def _message(told: Told) -> bytes:
    view = schema.EventView.of(told)
    said = ServerSentEvent(data=view.model_dump_json(), id=str(told.id), event=view.kind)
    return said.encode()


def _page(found: list[Told], limit: int, kind: str | None) -> tuple[list[Told], int | None]:
    """The first ones of that kind, and the id of the last one if there are more."""
    if kind is not None:
        found = [told for told in found if told.event.kind == kind]
    return (found[:limit], found[limit - 1].id) if len(found) > limit else (found, None)


def _text(description: str) -> dict[int | str, dict[str, object]]:
    content = {"text/plain": {"schema": {"type": "string"}}}
    return {200: {"description": description, "content": content}}
