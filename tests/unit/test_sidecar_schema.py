"""The sidecar's answers to requests that fit its OpenAPI description, and to other requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from pairs import Pair

from r2serve.observe.sidecar import app as sidecar
from r2serve.observe.watch import Watch

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

checks = pytest.importorskip("schemathesis.specs.openapi.checks")

CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
TOKEN = "0123456789abcdef"
EXAMPLES = 30


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The OpenAPI description of a sidecar with a worker that accepts drills."""
    pair = Pair(tmp_path_factory.mktemp("journals"), drills=True)
    app = sidecar.make_app(Watch(pair.folder), token=TOKEN, hosts=["testserver"])
    with TestClient(app):  # polls the journals in the background
        yield schemathesis.openapi.from_asgi("/openapi.json", app).exclude(
            path="/v1/events/stream"  # the stream has no end
        )
    pair.close()


@pytest.mark.slow
def test_every_answer_matches_the_openapi_description(described: Any) -> None:
    seen = []
    for found in described.get_all_operations():
        operation = found.ok()
        seen.append(operation.label)

        @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            case.call_and_validate(headers={"Authorization": f"Bearer {TOKEN}"}, checks=CHECKS)

        check()
    assert {"GET /v1/rails", "POST /v1/drills", "GET /v1/requests/{request}/impact"} < set(seen)
    assert len(seen) > 12
