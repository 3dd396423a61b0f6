"""A rank of `sglang serve` that leaves out a broadcast of requests: both nodes end in time."""

from __future__ import annotations

from pathlib import Path

import pytest
from served_stage import SILENCE_S, Stage, tokens_of
from sglang_processes import schedulers
from timely import timely

from r2serve.lab.serving.client import Load
from r2serve.lab.serving.serve import Server

PLUGIN = Path(__file__).parent / "skipping"
TOKENS = 3000
"""Decoding must last until the second load has sent its request."""
BEFORE = 32
"""Tokens of each stream before the broadcast is left out."""

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def begin(stage: Stage, server: Server, label: str, texts: slice) -> Load:
    """Begins to run some texts; the server has room for further requests."""
    path = stage.work / f"{label}.json"
    return Load(server.client, server.url, stage.texts[texts], TOKENS, path)


def test_a_skipped_broadcast_ends_both_nodes_before_the_tokens_leave(stage: Stage) -> None:
    """The rank is a broadcast behind: it decodes when the other rank computes a new prompt."""
    order = stage.work / "skip"
    settings = {"PYTHONPATH": str(PLUGIN), "R2SERVE_TEST_SKIP": str(order)}
    with stage.server(label="skipping", settings=settings) as server:
        server.wait_until_ready(lambda _: None)
        undisturbed = begin(stage, server, "undisturbed", slice(2))
        expected = tokens_of(undisturbed.finish(SILENCE_S, server.check_alive))
        parted = begin(stage, server, "parted", slice(2))
        parted.wait_for_tokens(2 * BEFORE, SILENCE_S)
        order.touch()
        timely(lambda: not order.exists(), "rank 1 has left out a broadcast")
        late = begin(stage, server, "late", slice(2, 3))
        timely(
            lambda: not any(schedulers(stage.work, rank) for rank in (0, 1)),
            "both schedulers have ended",
            within_s=120.0,
        )
        for load in (parted, late):
            load.stop()
        runs = [load.result(timeout_s=30) for load in (parted, late)]
        logs = [server.log_path(node).read_text(errors="replace") for node in (0, 1)]
    for request, whole in zip(runs[0].requests, expected, strict=True):
        assert not request.completed, "decoding ended before the new request: use more tokens"
        assert request.token_ids == whole[: len(request.token_ids)]
    assert [request.token_ids for request in runs[1].requests] == [()]
    for rank, log in enumerate(logs):
        lines = [line for line in log.splitlines() if "OrderMismatchError: " in line]
        assert lines, log[-3000:]
        assert "step " in lines[0], lines[0]
        assert f"rank {rank}" in lines[0], lines[0]
