"""Kubernetes probes and the Prometheus endpoint."""

from __future__ import annotations

from fastapi import FastAPI, Response

from r2serve.observe.sidecar import schema
from r2serve.observe.sidecar.responses import respond
from r2serve.observe.sidecar.state import State

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
        responses={503: {"model": schema.HealthView, "description": "Requests are not served."}},
    )
    async def readyz() -> Response:
        """Readiness: 200 while requests are served, 503 otherwise.

        Lost rails do not matter while each peer has a rail left. A stuck collective, a stopped
        process or a missing engine gives 503.
        """
        found = state.health()
        return respond(schema.HealthView.of(found), status=200 if found.ready else 503)

    @app.get("/health", tags=["probes"], response_model=schema.HealthView)
    async def healthy() -> Response:
        """Health of the node with reasons, for people: always 200."""
        return respond(schema.HealthView.of(state.health()))

    @app.get("/metrics", tags=["probes"], response_class=Response, responses=_text("Metrics."))
    async def metrics() -> Response:
        """Metrics in the Prometheus text format."""
        return respond(state.rendered("metrics", state.metrics.render), _PROMETHEUS)


def _text(description: str) -> dict[int | str, dict[str, object]]:
    content = {"text/plain": {"schema": {"type": "string"}}}
    return {200: {"description": description, "content": content}}
