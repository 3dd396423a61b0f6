"""Rails, collectives and workers of this node, over HTTP."""

from __future__ import annotations

from fastapi import FastAPI, Response

from r2serve.observe.sidecar import schema
from r2serve.observe.sidecar.responses import respond
from r2serve.observe.sidecar.state import State


def add_rails(app: FastAPI, state: State) -> None:
    """Adds /v1/rails, /v1/collectives and /v1/topology."""

    @app.get("/v1/rails", tags=["rails"], response_model=schema.RailsView)
    async def rails() -> Response:
        """Rails of the running workers: an entry per rail, peer and worker."""
        return respond(state.rendered("rails", lambda: schema.RailsView.of(state.watch)))

    @app.get("/v1/collectives", tags=["collectives"], response_model=schema.CollectivesView)
    async def collectives() -> Response:
        """Latencies of collectives, per communicator of each running worker."""
        return respond(
            state.rendered("collectives", lambda: schema.CollectivesView.of(state.watch))
        )

    @app.get("/v1/topology", tags=["rails"], response_model=schema.TopologyView)
    async def topology() -> Response:
        """The workers of this node, running or ended."""
        return respond(state.rendered("topology", lambda: schema.TopologyView.of(state.watch)))
