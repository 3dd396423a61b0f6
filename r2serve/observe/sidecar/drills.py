"""Drills over HTTP: what is under way, and, with the token, new ones."""

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

# For the description alone: the token is asked for before a request comes here.
_TOKEN = [Depends(HTTPBearer(scheme_name="token", auto_error=False))]
_UNAUTHORIZED: dict[int | str, dict[str, Any]] = {
    401: {"description": "Without the sidecar's token."}
}


class DrillOrder(BaseModel, extra="forbid"):
    model_config = example(kind="carrier_loss", rail="rail1@node0", seconds=10.0)
    kind: Literal["carrier_loss", "black_hole", "slow", "flap", "corrupt", "cut", "drop"] = Field(
        description="cut and drop are old words for carrier_loss and black_hole, and go."
    )
    rail: str = Field(max_length=64, description="As /v1/rails names it.")
    seconds: float = Field(ge=0.01, le=LONGEST_S, description="Then it is undone.")
    peer: str = Field("", max_length=64, description="Of the rail to one peer alone: rank 1.")
    mbit: float = Field(10.0, ge=0.001, le=1e6, description="Of slow: Mbit/s that are still sent.")
    period_s: float = Field(1.0, ge=0.02, le=LONGEST_S, description="Of flap.")


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
    worker: str = Field(description="Key of the worker whose rail it is.")
    kind: str
    rail: str
    peer: str
    by: str = Field(description="engine; system: by the drill command, through ip, nft or tc.")
    seconds: float
    mbit: float
    period_s: float
    began: datetime
    ended: datetime | None = Field(description="null: it is under way.")

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
    enabled: bool = Field(description="A worker here takes drills (R2CCL_DRILLS).")
    drills: list[DrillView] = Field(description="Those under way first.")


class StartedView(DrillsView):
    note: str = Field(description="Which word of the order a later release will not take.")


def _view(answering: int, found: list[dict[str, Any]]) -> DrillsView:
    return DrillsView(enabled=answering > 0, drills=[DrillView.of(view) for view in found])


def add_drills(app: FastAPI, state: State) -> None:
    """Adds /v1/drills and what is below it."""
    folder = state.watch.folder

    asking = asyncio.Lock()

    @app.get("/v1/drills", tags=["drills"], response_model=DrillsView)
    async def drills() -> Response:
        """Faults that are injected on purpose, and the last ones that were."""
        async with asking:  # all who ask between two looks get one answer
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
        | {409: {"description": "No worker takes it; the detail says why."}},
        dependencies=_TOKEN,
    )
    def start(order: DrillOrder) -> Response:
        """Fault a rail of this node for a while, by the engines of its workers."""
        # Not async: workers are asked one after the other, in a thread of the server's pool.
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
        responses=_UNAUTHORIZED | {404: {"description": "No such drill is under way."}},
        dependencies=_TOKEN,
    )
    def end(drill: Annotated[str, Path(description="Its id.", max_length=64)]) -> Response:
        """End a drill before its time."""
        try:
            client.end(folder, drill)
        except DrillError as error:
            raise HTTPException(404, str(error)) from error
        return Response(status_code=204)
