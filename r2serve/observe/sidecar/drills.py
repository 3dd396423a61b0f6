"""Drills over HTTP: lists drills; with the token, starts and ends drills."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, HTTPException, Path, Response
from fastapi.security import HTTPBearer
from pydantic import BaseModel, Field

from r2serve.drills import client
from r2serve.drills.order import LONGEST_S, DrillError
from r2serve.faults import note_on
from r2serve.observe.sidecar.responses import example, instant, respond
from r2serve.observe.sidecar.state import State

# Only for the OpenAPI description: the middleware Guard checks the token earlier.
_TOKEN = [Depends(HTTPBearer(scheme_name="token", auto_error=False))]
_UNAUTHORIZED: dict[int | str, dict[str, Any]] = {
    401: {"description": "The sidecar's token is missing or wrong."}
}


class DrillOrder(BaseModel, extra="forbid"):
    model_config = example(kind="carrier_loss", rail="rail1@node0", seconds=10.0)
    kind: Literal["carrier_loss", "black_hole", "slow", "flap", "corrupt", "cut", "drop"] = Field(
        description="Kind of fault. cut and drop are deprecated names of carrier_loss, black_hole. "
        "The command r2serve drill also has egress_refused, a fault by the operating system."
    )
    rail: str = Field(max_length=64, description="Name of the rail in /v1/rails.")
    seconds: float = Field(ge=0.01, le=LONGEST_S, description="Duration of the drill, s.")
    peer: str = Field(
        "", max_length=64, description="Fault only the rail to this peer, e.g. rank 1; empty: all."
    )
    mbit: float = Field(
        10.0, ge=0.001, le=1e6, description="Remaining send rate under kind slow, Mbit/s."
    )
    period_s: float = Field(1.0, ge=0.02, le=LONGEST_S, description="Period of kind flap, s.")


class DrillView(BaseModel):
    model_config = example(
        id="1b9c04fe",
        worker="4242-9f3c01aa",
        kind="carrier_loss",
        rail="rail1@node0",
        peer="",
        by="engine",
        seconds=10.0,
        mbit=10.0,
        period_s=1.0,
        began="2026-11-22T05:11:00.123456Z",
        ended=None,
    )
    id: str
    worker: str = Field(description="Key of the worker with the faulted rail.")
    kind: str
    rail: str
    peer: str
    by: str = Field(description="engine, or system (the drill command, by ip, nft or tc).")
    seconds: float
    mbit: float
    period_s: float
    began: datetime
    ended: datetime | None = Field(description="End of the drill; null while under way.")

    @classmethod
    def of(cls, view: dict[str, Any]) -> DrillView:
        fields = {name: view[name] for name in cls.model_fields if name in view}
        ended = int(view["ended_clock_ns"])
        return cls(
            **fields,
            began=instant(int(view["began_clock_ns"])),
            ended=instant(ended) if ended else None,
        )


class DrillsView(BaseModel):
    enabled: bool = Field(description="A worker of this node accepts drills (R2CCL_DRILLS).")
    drills: list[DrillView] = Field(description="Drills; drills under way are first.")


class StartedView(DrillsView):
    note: str = Field(description="Deprecation note about the kind's name; empty if none.")


def _view(answering: int, found: list[dict[str, Any]]) -> DrillsView:
    return DrillsView(enabled=answering > 0, drills=[DrillView.of(view) for view in found])


def add_drills(app: FastAPI, state: State) -> None:
    """Adds /v1/drills and /v1/drills/{drill}."""
    folder = state.watch.folder

    asking = asyncio.Lock()

    @app.get("/v1/drills", tags=["drills"], response_model=DrillsView)
    async def drills() -> Response:
        """Faults injected on purpose: under way, and the most recent."""
        async with asking:  # requests between two polls of the journals share an answer
            if (known := state.known("drills")) is None:
                answering, found = await asyncio.to_thread(client.listed, folder)
                known = state.rendered("drills", lambda: _view(answering, found))
        return respond(known)

    @app.post(
        "/v1/drills",
        tags=["drills"],
        status_code=201,
        response_model=StartedView,
        responses=_UNAUTHORIZED
        | {409: {"description": "No worker accepts the drill; the detail names the reason."}},
        dependencies=_TOKEN,
    )
    def start(order: DrillOrder) -> Response:
        """Inject a fault into a rail of this node for a limited time, by the workers' engines."""
        # Not async: the server's thread pool runs the blocking calls to the workers.
        try:
            workers = client.find(folder, order.rail)
            views = client.start(workers, **order.model_dump())
        except (DrillError, OSError) as error:
            raise HTTPException(409, str(error)) from error
        made = [
            DrillView.of(view | {"worker": client.key_of(worker.socket)})
            for view, worker in zip(views, workers, strict=True)
        ]
        view = StartedView(enabled=True, drills=made, note=note_on(order.kind))
        return respond(view, status=201)

    @app.delete(
        "/v1/drills/{drill}",
        tags=["drills"],
        status_code=204,
        response_class=Response,
        responses=_UNAUTHORIZED | {404: {"description": "No drill with this id is under way."}},
        dependencies=_TOKEN,
    )
    def end(drill: Annotated[str, Path(description="Id of the drill.", max_length=64)]) -> Response:
        """End a drill early."""
        try:
            client.end(folder, drill)
        except DrillError as error:
            raise HTTPException(404, str(error)) from error
        return Response(status_code=204)
