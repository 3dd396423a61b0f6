"""Workers whose programs part: the engine ends in that step, before a token of the step leaves."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from answers import FLAG, PROMPTS, RAILS

if TYPE_CHECKING:
    from conftest import Engine

TOKENS = 400
BEFORE = 20
"""Tokens that the client has received before a worker leaves out a call."""

PLACES = [
    pytest.param("first", marks=pytest.mark.long),
    "middle",
    pytest.param("last", marks=pytest.mark.long),
]


@pytest.mark.parametrize("place", PLACES)
def test_a_skipped_call_ends_the_step_without_a_token(
    start_engine: Callable[..., Engine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    order = tmp_path / "skip"
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    engine = start_engine(
        2,
        [*FLAG, "--worker-extension-cls", "skipping.Extension"],
        [
            RAILS | {"R2CCL_NODE": "node0"},
            RAILS | {"R2CCL_NODE": "node1", "R2SERVE_TEST_SKIP": str(order)},
        ],
        eager=True,
    )
    expected = list(stream(engine))
    assert len(expected) == TOKENS

    received = []
    for token in stream(engine):
        received.append(token)
        if len(received) == BEFORE:
            order.write_text(place)
    assert BEFORE <= len(received) < TOKENS
    assert received == expected[: len(received)], "a token of the parted step has left"

    for node in engine.nodes:
        node.process.wait(timeout=60)
        lines = [line for line in node.log.splitlines() if "OrderMismatchError" in line]
        assert lines, node.log[-3000:]
        for text in ("rank 0", "rank 1", "step ", "requests cmpl-"):
            assert text in lines[0], lines[0]


def stream(engine: Engine) -> Iterator[str]:
    """Yields the text of each token; ends at the end of the answer, or at an error."""
    body = {
        "model": str(engine.model),
        "prompt": PROMPTS[0],
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{engine.port}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            content = line.decode().removeprefix("data: ").strip()
            if not content or content == "[DONE]":
                continue
            said = json.loads(content)
            if "error" in said:
                return
            yield said["choices"][0]["text"]
