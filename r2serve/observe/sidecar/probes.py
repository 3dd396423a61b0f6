"""Kubernetes probes and the Prometheus endpoint."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query, Response

from r2serve.observe.health import NO_ENGINE
from r2serve.observe.sidecar import schema
from r2serve.observe.sidecar.responses import respond
from r2serve.observe.sidecar.state import State

Engine = Annotated[
    str | None,
    Query(max_length=64, description="Only the serving engine of this name; default: all."),
]
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def add_probes(app: FastAPI, state: State) -> None:
    """Adds /livez, /readyz, /health and /metrics."""

    @app.get(
        "/livez", tags=["probes"], response_class=Response, responses=_text("The sidecar runs.")
    )
    async def livez() -> Response:
        """Liveness of the sidecar: always 200, independent of the engine."""
        return respond(b"ok\n", "text/plain")

    @app.get(
        "/readyz",
        tags=["probes"],
        response_model=schema.HealthView,
        responses={
            404: {"model": schema.HealthView, "description": "No worker of this engine runs."},
            503: {"model": schema.HealthView, "description": "Requests are not served."},
        },
    )
    async def readyz(engine: Engine = None) -> Response:
        """Readiness: 200 while requests are served, 503 otherwise.

        Lost rails do not matter while each peer has a rail left. A stopped process or a missing
        engine gives 503, as does a peer that sends nothing for longer than --stuck-after. A long
        wait for a peer that computes does not. A worker that could make no journal counts as
        serving.
        """
        found = state.health(engine)
        unknown = engine is not None and found.status == NO_ENGINE
        status = 200 if found.ready else 404 if unknown else 503
        return respond(state.health_view(engine), status=status)

    @app.get("/health", tags=["probes"], response_model=schema.HealthView)
    async def healthy(engine: Engine = None) -> Response:
        """Health of the node for people: a sentence per fault, and its ends; always 200."""
        return respond(state.health_view(engine, details=True))

    @app.get("/metrics", tags=["probes"], response_class=Response, responses=_text("Metrics."))
    async def metrics() -> Response:
        """Metrics in the Prometheus text format."""
        return respond(state.rendered("metrics", state.metrics.render), _PROMETHEUS)


def _text(description: str) -> dict[int | str, dict[str, object]]:
    content = {"text/plain": {"schema": {"type": "string"}}}
    return {200: {"description": description, "content": content}}
