"""What rail events cost each request, over HTTP."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Path, Query, Response
from pydantic import BaseModel, Field

from r2serve.observe.causes import causes_of
from r2serve.observe.impact import HeldStep, TrackedRequest, figures_of
from r2serve.observe.sidecar.responses import example, instant, respond
from r2serve.observe.sidecar.schema import EventView
from r2serve.observe.sidecar.state import State
from r2serve.observe.watch import Watch

MAX_PAGE = 1000


_REQUEST = {
    "id": "chatcmpl-8c1f",
    "number": 17,
    "status": "finished",
    "reason": "length",
    "prompt_tokens": 12,
    "tokens": 128,
    "queued_s": 0.001,
    "ttft_s": 0.021,
    "mean_itl_s": 0.0062,
    "worst_itl_s": 0.208,
    "e2e_s": 0.808,
    "queue_stall_s": 0.0,
    "prefill_stall_s": 0.0,
    "decode_stall_s": 0.202,
    "stall_s": 0.202,
    "late_s": 0.205,
    "stall_percent": 25.0,
    "ttft_without_s": 0.021,
    "mean_itl_without_s": 0.0046,
    "e2e_without_s": 0.603,
    "held_steps": 1,
}


class RequestView(BaseModel):
    model_config = example(**_REQUEST)
    id: str = Field(description="The engine's answer has it, too.")
    number: int = Field(description="Rises with each request that became known here.")
    status: str = Field(description="running, or finished.")
    reason: str | None = Field(description="Why it ended: stop, length, abort.")
    prompt_tokens: int | None
    tokens: int | None = Field(description="That were generated.")
    queued_s: float | None = Field(description="Waiting to be scheduled.")
    ttft_s: float | None = Field(description="From its arrival to its first token.")
    mean_itl_s: float | None = Field(description="Mean time between two tokens.")
    worst_itl_s: float | None = Field(
        description="Longest time between two tokens, as the worker saw them."
    )
    e2e_s: float | None = Field(description="From its arrival to its end.")
    queue_stall_s: float = Field(
        description="Waited because of rail events before it was scheduled; known when it ended."
    )
    prefill_stall_s: float = Field(description="From then to its first token.")
    decode_stall_s: float = Field(description="And after it.")
    stall_s: float = Field(description="All of them.")
    late_s: float = Field(
        description="By how much longer than usual the steps that held it up took; where that is "
        "not known, and at least, what they waited."
    )
    stall_percent: float | None = Field(description="Of e2e_s.")
    ttft_without_s: float | None = Field(
        description="Estimate, had there been no fault: less what it was late by."
    )
    mean_itl_without_s: float | None
    e2e_without_s: float | None
    held_steps: int = Field(description="Steps of workers of this node that rail events held up.")

    @classmethod
    def of(cls, request: TrackedRequest) -> RequestView:
        return cls(**_fields(request))


class StallView(BaseModel):
    model_config = example(
        collective="all_reduce",
        group="tp:0",
        call=4711,
        began="2026-11-22T05:11:00.123456Z",
        seconds=0.202,
    )
    collective: str
    group: str
    call: int
    began: datetime
    seconds: float


class HeldStepView(BaseModel):
    model_config = example(
        worker="4242-9f3c01aa",
        label="rank 0",
        step=812,
        phase="decode",
        began="2026-11-22T05:11:00.120000Z",
        ended="2026-11-22T05:11:00.327000Z",
        stalls=[],
    )
    worker: str
    label: str
    step: int = Field(description="Steps of that worker, from 1.")
    phase: str = Field(
        description="What it did for this request: prefill, decode, or queue: it kept it waiting."
    )
    began: datetime
    ended: datetime
    stalls: list[StallView]

    @classmethod
    def of(cls, held: HeldStep) -> HeldStepView:
        return cls(
            worker=held.worker,
            label=held.label,
            step=held.step,
            phase=held.phase,
            began=instant(held.began_clock_ns),
            ended=instant(held.ended_clock_ns),
            stalls=[
                StallView(
                    collective=stall.collective,
                    group=stall.group,
                    call=stall.call,
                    began=instant(stall.began_clock_ns),
                    seconds=stall.ns / 1e9,
                )
                for stall in held.stalls
            ],
        )


class ImpactView(RequestView):
    model_config = example(**_REQUEST, steps=[], events=[])
    steps: list[HeldStepView] = Field(description="The last ones that held it up.")
    events: list[EventView] = Field(description="What happened to rails then, oldest first.")

    @classmethod
    def of_all(cls, request: TrackedRequest, watch: Watch) -> ImpactView:
        return cls(
            **_fields(request),
            steps=[HeldStepView.of(held) for held in request.steps],
            events=[EventView.of(told) for told in causes_of(request, watch)],
        )


class RequestsView(BaseModel):
    requests: list[RequestView] = Field(description="Newest first.")
    next: int = Field(description="Ask with before=next for older ones; 0: there are none.")
    known: int = Field(description="Requests that are kept here.")
    unreadable: dict[str, str] = Field(description="Why, by file, of request logs.")


def add_requests(app: FastAPI, state: State) -> None:
    """Adds /v1/requests and what is below it."""

    @app.get("/v1/requests", tags=["requests"], response_model=RequestsView)
    async def requests(
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
        before: Annotated[
            int | None, Query(ge=1, le=2**62, description="Only ones with lower numbers.")
        ] = None,
        waited: Annotated[bool, Query(description="Only ones that rail events held up.")] = False,
    ) -> Response:
        """Requests, and what rail events cost each, a page at a time."""
        kept = state.requests
        found = kept.newest(before=before, limit=limit + 1, waited=waited)
        more = len(found) > limit
        view = RequestsView(
            requests=[RequestView.of(request) for request in found[:limit]],
            next=found[limit - 1].number if more else 0,
            known=len(kept),
            unreadable=dict(kept.unreadable),
        )
        return respond(view)

    @app.get(
        "/v1/requests/{request}/impact",
        tags=["requests"],
        response_model=ImpactView,
        responses={404: {"description": "No such request is kept here."}},
    )
    async def impact(
        request: Annotated[str, Path(description="Its id.", max_length=512)],
    ) -> Response:
        """What held a request up, step by step, and what it would have taken without."""
        found = state.requests.get(request)
        if found is None:
            raise HTTPException(404, f"no request {request!r} is kept here")
        return respond(ImpactView.of_all(found, state.watch))


def _fields(request: TrackedRequest) -> dict[str, Any]:
    """Every field of a view; None where it is not known yet."""
    return dict.fromkeys(RequestView.model_fields) | figures_of(request)
