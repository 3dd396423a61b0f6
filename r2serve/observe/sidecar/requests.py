"""Cost of rail events per request, over HTTP."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Path, Query, Response
from pydantic import BaseModel, Field
from starlette.convertors import StringConvertor, register_url_convertor

from r2serve.observe.causes import causes_of
from r2serve.observe.impact import HeldStep, TrackedRequest, figures_of
from r2serve.observe.names import request_name
from r2serve.observe.sidecar.responses import example, instant, respond
from r2serve.observe.sidecar.schema import EventView
from r2serve.observe.sidecar.state import State
from r2serve.observe.watch import Watch

MAX_PAGE = 1000
LONGEST_ID = 8192
"""Longest id of a client that the sidecar looks up, in characters; its name is shorter. The server
limits the whole head of the request, see MAX_HEAD_BYTES."""


class _ClientId(StringConvertor):
    """A part of a path with slashes and line ends, which ids of clients may contain."""

    regex = r"[\s\S]+"


register_url_convertor("client_id", _ClientId())

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
    id: str = Field(
        description="Name of the request: the id in the engine's response, with escapes for spaces "
        "and unprintable characters, and shortened to 128 characters."
    )
    number: int = Field(description="Serial number in order of first mention in the logs.")
    status: str = Field(description="running or finished.")
    reason: str | None = Field(description="Finish reason: stop, length or abort.")
    prompt_tokens: int | None
    tokens: int | None = Field(description="Generated tokens.")
    queued_s: float | None = Field(description="Time in the queue until scheduled.")
    ttft_s: float | None = Field(description="Time from arrival to the first token.")
    mean_itl_s: float | None = Field(description="Mean inter-token latency.")
    worst_itl_s: float | None = Field(
        description="Longest inter-token latency, measured at the worker."
    )
    e2e_s: float | None = Field(description="Time from arrival to the end.")
    queue_stall_s: float = Field(
        description="Rail-event stalls before scheduling; computed when the request has ended."
    )
    prefill_stall_s: float = Field(description="Rail-event stalls until the first token.")
    decode_stall_s: float = Field(description="Rail-event stalls after the first token.")
    stall_s: float = Field(description="Sum of the queue, prefill and decode stalls.")
    late_s: float = Field(
        description="Excess duration of the affected steps over their baseline; at least the "
        "stall time, and equal to the stall time if no baseline is known."
    )
    stall_percent: float | None = Field(description="stall_s in percent of e2e_s.")
    ttft_without_s: float | None = Field(
        description="Estimated ttft_s without the fault; the delay is subtracted."
    )
    mean_itl_without_s: float | None
    e2e_without_s: float | None
    held_steps: int = Field(description="Steps of this node's workers stalled by rail events.")

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
    step: int = Field(description="Number of the worker's step, from 1.")
    phase: str = Field(
        description="Phase of the request: prefill, decode, or queue (waiting, not served)."
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
    steps: list[HeldStepView] = Field(description="The last stalled steps of the request.")
    events: list[EventView] = Field(description="Rail events around the stalls, oldest first.")

    @classmethod
    def of_all(cls, request: TrackedRequest, watch: Watch) -> ImpactView:
        return cls(
            **_fields(request),
            steps=[HeldStepView.of(held) for held in request.steps],
            events=[EventView.of(told) for told in causes_of(request, watch)],
        )


class RequestsView(BaseModel):
    requests: list[RequestView] = Field(description="Newest first.")
    next: int = Field(description="Value of `before` for the next page; 0 = no older requests.")
    known: int = Field(description="Number of requests kept by the sidecar.")
    unreadable: dict[str, str] = Field(description="Error per unreadable request log, by file.")


def add_requests(app: FastAPI, state: State) -> None:
    """Adds /v1/requests and /v1/requests/{request}/impact."""

    @app.get("/v1/requests", tags=["requests"], response_model=RequestsView)
    async def requests(
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
        before: Annotated[
            int | None, Query(ge=1, le=2**62, description="Only requests with lower numbers.")
        ] = None,
        waited: Annotated[bool, Query(description="Only requests stalled by rail events.")] = False,
    ) -> Response:
        """Requests with timings and stalls, newest first, in pages."""
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
        "/v1/requests/{request:client_id}/impact",
        tags=["requests"],
        response_model=ImpactView,
        responses={404: {"description": "The sidecar keeps no request with this id."}},
    )
    async def impact(
        request: Annotated[str, Path(description="Id of the request.", max_length=LONGEST_ID)],
    ) -> Response:
        """Stalled steps and rail events of a request, and estimated times without the fault."""
        found = state.requests.get(request)
        if found is None:
            raise HTTPException(404, f"request {request_name(request)!r} is not known here")
        return respond(ImpactView.of_all(found, state.watch))


def _fields(request: TrackedRequest) -> dict[str, Any]:
    """Returns every field of a view; None for unknown values."""
    return dict.fromkeys(RequestView.model_fields) | figures_of(request)
