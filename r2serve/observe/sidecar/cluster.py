"""Cluster view: this node and the nodes of ``--peers``."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import FastAPI, Response
from pydantic import BaseModel, Field

from r2serve.observe.sidecar.responses import respond
from r2serve.observe.sidecar.schema import MemberView, NodeView
from r2serve.observe.sidecar.state import State


class ClusterView(BaseModel):
    members: list[MemberView] = Field(description="Members of the cluster; this node is first.")


def add_cluster(app: FastAPI, state: State) -> None:
    """Adds /v1/node, read by other sidecars, and /v1/cluster."""

    @app.get("/v1/node", tags=["cluster"], response_model=NodeView)
    async def node() -> Response:
        """Health, workers and rails of this node; polled by other sidecars."""
        return respond(state.rendered("node", lambda: NodeView.of(state.health(), state.watch)))

    @app.get("/v1/cluster", tags=["cluster"], response_model=ClusterView)
    async def cluster() -> Response:
        """This node and the nodes of ``--peers``, including members without an answer."""
        return respond(state.rendered("cluster", lambda: _cluster(state)))


def _cluster(state: State) -> ClusterView:
    now = datetime.now(UTC)
    own = MemberView(
        url="", answers=True, error="", asked=now, node=NodeView.of(state.health(), state.watch)
    )
    return ClusterView(members=[own, *state.peers.views()])
