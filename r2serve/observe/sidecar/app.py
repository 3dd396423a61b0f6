"""The sidecar's HTTP application. Each group of routes has a module in this folder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles

from r2serve.observe.health import STUCK_S
from r2serve.observe.sidecar.auth import Guard
from r2serve.observe.sidecar.cluster import add_cluster
from r2serve.observe.sidecar.drills import add_drills
from r2serve.observe.sidecar.events import add_events
from r2serve.observe.sidecar.identity import add_identity
from r2serve.observe.sidecar.middleware import (
    BodyLimit,
    Compression,
    Heads,
    OwnHosts,
    SecurityHeaders,
    own_names,
)
from r2serve.observe.sidecar.peers import Peers
from r2serve.observe.sidecar.polls import keep_polling
from r2serve.observe.sidecar.probes import add_probes
from r2serve.observe.sidecar.rails import add_rails
from r2serve.observe.sidecar.requests import add_requests
from r2serve.observe.sidecar.state import State
from r2serve.observe.watch import Watch

_CSP = "Content-Security-Policy"
_PAGE = (
    "default-src 'self'; img-src data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_GZIP_FROM_BYTES = 1000
_GZIP_LEVEL = 4


def make_app(
    watch: Watch,
    *,
    stuck_s: float = STUCK_S,
    token: str | None = None,
    read_token: str | None = None,
    peers: Sequence[str] = (),
    peers_ca: Path | None = None,
    hosts: Sequence[str] = (),
) -> FastAPI:
    """Builds the application. Polling of the watch starts with the application.

    Args:
        watch: follows the folder with the workers' journals.
        stuck_s: a peer that is silent on all rails for longer, in s, makes ``/readyz`` answer 503.
        token: required to start and end drills; None disables drills.
        read_token: required to read all but the probes, here and at the peers; None: none is.
        peers: addresses of other nodes' sidecars.
        peers_ca: certificates of the authorities of peers with https; None: the system's.
        hosts: names of this host in requests, beside addresses, localhost and its own name.

    Raises:
        PeerError: an address is invalid, or the certificates are unusable.
        ValueError: a host's name has a misplaced wildcard.
    """
    state = State(watch, Peers(peers, read_token, peers_ca), stuck_s)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        following = [
            asyncio.create_task(keep_polling("journals", state.poll, state.failed)),
            asyncio.create_task(
                keep_polling("sidecars of other nodes", state.peers.poll, state.peers.failed)
            ),
        ]
        await asyncio.sleep(0)  # each task has its first look, whose failure ends no start
        yield
        for task in following:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        state.requests.close()

    app = FastAPI(
        title="r2serve sidecar",
        summary="Rails, failovers and the cost of failovers for the workers of this node.",
        version=version("r2serve"),
        lifespan=lifespan,
        docs_url=None,  # the page would load third-party scripts
        redoc_url=None,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
    )
    app.state.sidecar = state
    # The last one added is the first one asked.
    app.add_middleware(Compression, minimum_size=_GZIP_FROM_BYTES, compresslevel=_GZIP_LEVEL)
    app.add_middleware(BodyLimit)
    app.add_middleware(Guard, token=token, read_token=read_token)
    app.add_middleware(Heads)
    app.add_middleware(OwnHosts, names=own_names(hosts))
    app.add_middleware(SecurityHeaders)
    add_probes(app, state)
    add_rails(app, state)
    add_events(app, state)
    add_requests(app, state)
    add_drills(app, state)
    add_cluster(app, state)
    add_identity(app, state)
    _add_dashboard(app)
    return app


def _add_dashboard(app: FastAPI) -> None:
    folder = Path(__file__).parent / "static"
    app.mount("/static", StaticFiles(directory=folder))

    @app.get("/", include_in_schema=False)
    async def dashboard() -> FileResponse:
        return FileResponse(folder / "index.html", headers={_CSP: _PAGE})
