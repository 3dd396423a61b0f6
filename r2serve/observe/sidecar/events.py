"""Events over HTTP: in pages, or as a live stream."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Annotated, Literal

from fastapi import FastAPI, Header, Query, Request, Response
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

from r2serve.observe.sidecar import schema
from r2serve.observe.sidecar.middleware import STREAM
from r2serve.observe.sidecar.responses import respond
from r2serve.observe.sidecar.state import State
from r2serve.observe.watch import NumberedEvent

_LOG = logging.getLogger("r2serve.sidecar")

PING_S = 15
SEND_S = 30
"""Send timeout of a stream, s; a client stalled for longer is disconnected."""
MAX_PAGE = 1000
BATCH = 100
"""Most events per send of a stream."""
EventKind = Literal[
    "rail_state",
    "verdict",
    "speed",
    "stall",
    "replay",
    "hedge",
    "abort",
    "injected",
    "short_of_cpu",
]


def add_events(app: FastAPI, state: State) -> None:
    """Adds /v1/events and /v1/events/stream."""
    watch = state.watch

    @app.get("/v1/events", tags=["events"], response_model=schema.EventsView)
    async def events(
        after: Annotated[int, Query(ge=0, le=2**62, description="Only events after this id.")] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
        kind: Annotated[EventKind | None, Query(description="Only events of this kind.")] = None,
    ) -> Response:
        """Past events, in pages."""
        found, reached = _page(watch.after(after), limit, kind)
        return respond(
            schema.EventsView(
                events=[schema.EventView.of(told) for told in found],
                next=max(after, watch.last_id if reached is None else reached),
                first_kept=watch.events[0].id if watch.events else 0,
            )
        )

    @app.get(
        STREAM,
        tags=["events"],
        response_class=Response,
        responses={
            200: {
                "description": "Server-sent events with the event's id, the kind as event type, "
                "and an EventView as data.",
                "content": {"text/event-stream": {"schema": {"type": "string"}}},
            },
        },
    )
    async def stream(
        request: Request,
        after: Annotated[
            int | None,
            Query(ge=0, le=2**62, description="Begin after this id; default: new events only."),
        ] = None,
        last_event_id: Annotated[str | None, Header(max_length=32)] = None,
    ) -> Response:
        """Live stream of events.

        A reconnecting client resumes after the Last-Event-ID header. A client too slow for the
        stream misses only events dropped from the sidecar's history; nothing is buffered per
        client. Beyond 64 streams, an old stream of the busiest address ends for the new one.
        """
        client = request.client.host if request.client else ""
        begin = watch.last_id if after is None else after
        if last_event_id is not None and last_event_id.isascii() and last_event_id.isdigit():
            begin = int(last_event_id)
        return _Stream(_follow(state, begin, client), ping=PING_S, send_timeout=SEND_S)


class _Stream(EventSourceResponse):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            _LOG.warning("event stream: disconnected a client stalled for %g s", SEND_S)


async def _follow(state: State, last: int, client: str) -> AsyncIterator[bytes]:
    """Yields batches of events after `last`; keeps only the id of the last event per client."""
    mine = state.streams.add(client)
    state.wake()  # a stream that makes room may wait for events
    try:
        while not mine.over:
            found = state.watch.after(last)[:BATCH]
            if not found:
                await state.news()
                continue
            last = found[-1].id
            yield b"".join(map(_message, found))
    finally:
        state.streams.remove(mine)


def _message(told: NumberedEvent) -> bytes:
    view = schema.EventView.of(told)
    said = ServerSentEvent(data=view.model_dump_json(), id=str(told.id), event=view.kind)
    return said.encode()


def _page(
    found: list[NumberedEvent], limit: int, kind: str | None
) -> tuple[list[NumberedEvent], int | None]:
    """Returns the first `limit` events of a kind; also the last id if more events follow."""
    if kind is not None:
        found = [told for told in found if told.event.kind == kind]
    return (found[:limit], found[limit - 1].id) if len(found) > limit else (found, None)
