"""Timings of SGLang's requests as seen by clients."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from r2serve.engines import flag
from r2serve.engines.sglang import timings


class Manager:
    """SGLang's TokenizerManager as far as r2serve reads it."""

    def __init__(self, *rids: str) -> None:
        self.rid_to_state = {
            rid: SimpleNamespace(
                time_stats=SimpleNamespace(
                    created_time=10.0, first_token_time=10.5, finished_time=0.0
                )
            )
            for rid in rids
        }


async def original(manager: Manager, output: Any) -> None:
    """Ends requests like SGLang: sets the time, and forgets the request."""
    for rid, reason in zip(output.rids, output.finished_reasons, strict=True):
        state = manager.rid_to_state.get(rid)
        if reason is not None and state is not None:
            state.time_stats.finished_time = 13.0
            del manager.rid_to_state[rid]


def output(*rids: str, finished: bool = True) -> Any:
    return SimpleNamespace(
        rids=list(rids),
        finished_reasons=[{"type": "length", "length": 6} if finished else None] * len(rids),
        prompt_tokens=[12] * len(rids),
        completion_tokens=[6] * len(rids),
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(flag.VARIABLE, "r2ccl")
    monkeypatch.setenv("R2CCL_JOURNAL_DIR", str(tmp_path))
    return tmp_path


def lines(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("frontend-*.requests")
    return [json.loads(line) for line in path.read_text().splitlines()][1:]


def test_a_finished_request_has_its_times(folder: Path) -> None:
    manager = Manager("a", "b")
    asyncio.run(timings.handle_batch_output(original, manager, output("a", "b", finished=False)))
    assert lines(folder) == []
    asyncio.run(timings.handle_batch_output(original, manager, output("a")))
    [line] = lines(folder)
    wanted = {"finished": "a", "reason": "length", "prompt_tokens": 12, "tokens": 6}
    wanted |= {"queued_s": 0.0, "prefill_s": 0.5, "decode_s": 2.5, "e2e_s": 3.0}
    assert line.items() >= wanted.items()
    assert list(manager.rid_to_state) == ["b"]


def test_health_checks_and_deleted_requests_are_left_out(folder: Path) -> None:
    manager = Manager("HEALTH_CHECK_1")
    both = output("HEALTH_CHECK_1", "deleted")
    asyncio.run(timings.handle_batch_output(original, manager, both))
    assert lines(folder) == []


def test_without_the_choice_nothing_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(flag.VARIABLE, "default")
    manager = Manager("a")
    asyncio.run(timings.handle_batch_output(original, manager, output("a")))
    assert list(folder.iterdir()) == []
    assert not manager.rid_to_state, "SGLang's own function ran"


def test_an_error_ends_the_timings_and_no_request(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = Manager("a", "b")
    for rid in "ab":
        broken = output(rid)
        del broken.prompt_tokens
        asyncio.run(timings.handle_batch_output(original, manager, broken))
    assert not manager.rid_to_state
    assert caplog.text.count("request timings are disabled") == 1


@pytest.mark.parametrize(
    ("backend", "spans", "rank", "told"),
    [
        ("r2ccl", "0", None, ["engine sglang"]),  # a single scheduler
        ("r2ccl", "0", 0, ["engine sglang"]),
        ("r2ccl", "0", 1, []),
        ("r2ccl", "1", 0, []),  # its journal tells
        ("default", "0", 0, []),
    ],
)
def test_an_engine_without_rails_is_told_before_its_first_request(
    monkeypatch: pytest.MonkeyPatch, backend: str, spans: str, rank: int | None, told: list[str]
) -> None:
    """With --skip-server-warmup no request precedes the probe."""
    import torch.distributed as dist

    monkeypatch.setenv(flag.VARIABLE, backend)
    monkeypatch.setenv(flag.SPANS_VARIABLE, spans)
    monkeypatch.setattr(dist, "is_initialized", lambda: rank is not None)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    labels: list[str] = []
    monkeypatch.setattr(timings.without_rails, "tell_once", labels.append)
    ran = []

    def original(scheduler: str) -> str:
        ran.append((scheduler, list(labels)))
        return "ended"

    assert timings.run_event_loop(original, "scheduler") == "ended"
    assert ran == [("scheduler", told)]
