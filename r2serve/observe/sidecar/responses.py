"""How the sidecar answers: what all its routes have in common."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import Response
from pydantic import BaseModel, ConfigDict

SECURITY = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
JSON = "application/json"


def example(**fields: Any) -> ConfigDict:
    """The configuration of a model that has this as its example."""
    return ConfigDict(json_schema_extra={"examples": [fields]})


def instant(clock_ns: int) -> datetime:
    """CLOCK_REALTIME, in ns, as JSON has it."""
    return datetime.fromtimestamp(clock_ns / 1e9, UTC)


def as_json(view: BaseModel) -> bytes:
    return view.model_dump_json().encode()


def respond(content: bytes | BaseModel, media_type: str = JSON, status: int = 200) -> Response:
    """An answer of a model, or of bytes of that type."""
    if isinstance(content, BaseModel):
        content = as_json(content)
    return Response(content, status, SECURITY, media_type)
