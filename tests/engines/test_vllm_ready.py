"""Readiness of an engine that has no rail."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from answers import FLAG
from timely import timely

from r2serve.engines.without_rails import WHY

if TYPE_CHECKING:
    from conftest import Engine


@pytest.mark.long
@pytest.mark.case("25", "an engine without rails was never ready")
def test_an_engine_with_nothing_to_protect_is_ready(
    start_engine: Callable[..., Engine], tmp_path: Path, sidecar_port: int
) -> None:
    flags = [*FLAG, "--r2serve-sidecar", str(sidecar_port)]
    start_engine(1, flags, [{"R2CCL_JOURNAL_DIR": str(tmp_path)}])

    def found() -> dict[str, Any] | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{sidecar_port}/readyz") as answer:
                read: dict[str, Any] = json.load(answer)
                return read
        except OSError:  # the sidecar starts beside the engine, and answers 503 at first
            return None

    ready = timely(found, "the node is ready", within_s=120, every_s=0.5)
    assert ready is not None
    assert ready["status"] == "ok"
    (note,) = ready["notes"]
    assert note.endswith(f"has nothing to protect: {WHY}")
