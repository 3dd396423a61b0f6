"""Response helpers shared by all routes of the sidecar."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import Response
from pydantic import BaseModel, ConfigDict

JSON = "application/json"


def example(**fields: Any) -> ConfigDict:
    """Returns a model configuration with an OpenAPI example."""
    return ConfigDict(json_schema_extra={"examples": [fields]})


def instant(clock_ns: int) -> datetime:
    """Converts CLOCK_REALTIME in ns to a UTC datetime for JSON."""
    return datetime.fromtimestamp(clock_ns / 1e9, UTC)


def as_json(view: BaseModel) -> bytes:
    return view.model_dump_json().encode()


def respond(content: bytes | BaseModel, media_type: str = JSON, status: int = 200) -> Response:
    """Returns a response with a model as JSON, or with bytes of `media_type`."""
    if isinstance(content, BaseModel):
        content = as_json(content)
    return Response(content, status, media_type=media_type)
