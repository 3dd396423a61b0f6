"""One view of all nodes: this one, and those whose sidecars are asked."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import FastAPI, Response
from pydantic import BaseModel, Field

from r2serve.observe.sidecar.responses import respond
from r2serve.observe.sidecar.schema import MemberView, NodeView
from r2serve.observe.sidecar.state import State


class ClusterView(BaseModel):
    members: list[MemberView] = Field(description="This node first.")


def add_cluster(app: FastAPI, state: State) -> None:
    """Adds /v1/node, for other sidecars, and /v1/cluster, what they all say."""

    @app.get("/v1/node", tags=["cluster"], response_model=NodeView)
    async def node() -> Response:
        """This node alone, as other sidecars ask it."""
        return respond(state.rendered("node", lambda: NodeView.of(state.health(), state.watch)))

    @app.get("/v1/cluster", tags=["cluster"], response_model=ClusterView)
    async def cluster() -> Response:
        """This node and those of ``--peers``; one that does not answer is said not to."""
        return respond(state.rendered("cluster", lambda: _cluster(state)))


def _cluster(state: State) -> ClusterView:
    now = datetime.now(UTC)
    own = MemberView(
        url="", answers=True, error="", asked=now, node=NodeView.of(state.health(), state.watch)
    )
    return ClusterView(members=[own, *state.peers.views()])
