"""Workers whose programs part: the engine ends in that step, before a token of the step leaves."""

from __future__ import annotations

import json
import os
import random
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from answers import FLAG, PROMPTS, RAILS
from timely import ended, timely

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
    expected = "".join(stream(engine))
    received = ""
    for number, text in enumerate(stream(engine), start=1):
        received += text
        if number == BEFORE:
            written = order.with_suffix(".new")
            written.write_text(place)
            written.rename(order)
    assert number >= BEFORE
    assert len(received) < len(expected)
    assert expected.startswith(received), "a token of the parted step has left"

    for node in engine.nodes:
        ended(node.process, "a node whose worker left out a call", within_s=120)
    said = []
    for rank, node in enumerate(engine.nodes):
        lines = [line for line in node.log.splitlines() if "OrderMismatchError" in line]
        assert lines, node.log[-3000:]
        for text in ("step ", "requests cmpl-", f"rank {rank}"):
            assert text in lines[0], lines[0]
        said.append(lines[0])
    # The position of the other rank is left out if it does not arrive within 500 ms.
    timely(
        lambda: all(f"rank {other}" in line for line, other in zip(said, (1, 0), strict=True)),
        f"both ranks know the positions of both: {said}",
        within_s=0,
    )


def stream(engine: Engine, errors: list[str] | None = None, **more: object) -> Generator[str]:
    """Yields the text of each piece; ends at the end of the answer, or at an error.

    errors: receives the error.
    """
    body = {
        "model": str(engine.model),
        "prompt": PROMPTS[0],
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        **more,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{engine.port}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        for line in answer:
            content = line.decode().removeprefix("data: ").strip()
            if not content or content == "[DONE]":
                continue
            said = json.loads(content)
            if "error" in said:
                if errors is not None:
                    errors.append(str(said["error"]))
                return
            yield said["choices"][0]["text"]


NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}'
# vLLM's platform for CPUs has no asynchronous scheduling. `test_vllm_on_fake_driver.py` runs it
# with vLLM's GPU workers; `unit/test_device.py` and `unit/test_vllm_outputs.py` play its order of
# steps and outputs.
FEATURES = {
    "tensor parallel": (2, []),
    "pipeline": (1, ["--pipeline-parallel-size", "2"]),
    "ngram drafts": (2, ["--speculative-config", NGRAM]),
    "experts, one engine idle": (1, ["--data-parallel-size", "2"]),
}
KINDS = ("texts", "structured outputs", "aborts")
SERVED_S = float(os.environ.get("R2SERVE_SERVED_S", "60"))
"""Seconds of mixed serving for each feature and comparison."""


@pytest.mark.long
@pytest.mark.parametrize("consensus", ["step", "site-error"])
@pytest.mark.parametrize("feature", FEATURES)
def test_no_feature_of_the_engine_parts_its_workers(
    request: pytest.FixtureRequest, show: Callable[[str], None], feature: str, consensus: str
) -> None:
    ranks, flags = FEATURES[feature]
    # Without a compiler's warm-up, vLLM's second stage on a CPU has no buffers.
    eager = feature != "pipeline"
    nodes = [RAILS | {"R2CCL_NODE": "per-rank", "R2CCL_CONSENSUS": consensus}]
    experts = feature == "experts, one engine idle"
    start: Callable[..., Engine] = request.getfixturevalue(
        "start_moe" if experts else "start_engine"
    )
    engine = start(ranks, [*FLAG, *flags], nodes, eager=eager)
    ends = time.monotonic() + SERVED_S
    clients = 1 if experts else 4
    with ThreadPoolExecutor(clients) as pool:
        of_clients = pool.map(lambda seed: mixed(engine, seed, ends), range(clients))
        counts = sum(of_clients, Counter[str]())
    mismatches = engine.nodes[0].log.count("OrderMismatch")
    served = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)
    show(f"{feature}, {consensus}: {served}, {counts['errors']} errors, {mismatches} mismatches")
    assert counts["errors"] == 0, engine.nodes[0].log[-3000:]
    assert mismatches == 0
    assert engine.nodes[0].process.poll() is None
    assert all(counts[kind] for kind in KINDS), counts
    assert counts.total() > 10


def mixed(engine: Engine, seed: int, ends: float) -> Counter[str]:
    """Sends requests until the time ``ends``; returns the numbers of KINDS and of errors."""
    chance = random.Random(seed)
    counts: Counter[str] = Counter()
    turn = seed
    while time.monotonic() < ends:
        turn += 1
        more: dict[str, object] = {"max_tokens": chance.randint(20, 60)}
        kind = "texts"
        if turn % 4 == 1:
            kind = "structured outputs"
            more["structured_outputs"] = {"choice": PROMPTS[0].split()[:4]}
        leaves_after = chance.randint(1, 3) if turn % 3 == 2 else None
        errors: list[str] = []
        answer = stream(engine, errors, prompt=chance.choice(PROMPTS), **more)
        for number, _ in enumerate(answer, start=1):
            if number == leaves_after:
                kind = "aborts"
                break
        answer.close()
        counts[kind] += not errors
        counts["errors"] += len(errors)
    return counts
