"""Readiness of a rank that waits: for a peer that computes, and for a peer that is stopped."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from test_interrupts import start

from r2serve.observe import health
from r2serve.observe.watch import Watch

WAIT_S = health.STUCK_S + 2


@pytest.mark.timeout(300)
@pytest.mark.case("25", "a rank that waits was no longer ready, although its peer computed")
def test_a_rank_that_waits_is_ready_until_its_peer_is_stopped(
    jobs: Any, eventually: Any, tmp_path: Path
) -> None:
    ranks = start(jobs, {"journal_dir": str(tmp_path)})
    watch = Watch(tmp_path)

    def found() -> health.Health:
        watch.look()
        return health.examine(watch)

    def waits_on(texts: tuple[str, ...]) -> bool:
        silent = [text for text in texts if text.startswith("rank 0: rank 1 has sent nothing on")]
        return len(silent) == 1 and "; all_reduce of default has run for " in silent[0]

    eventually("ready", lambda: found().ready)
    time.sleep(WAIT_S)  # the call is older than STUCK_S
    # A starved machine may keep a process from its heartbeat and its answers for seconds.
    eventually("ready during a long call", lambda: found().ready)
    ranks[1].process.send_signal(signal.SIGSTOP)
    eventually("rank 0 tells of its silent peer", lambda: waits_on(found().reasons))
    assert not found().ready
    ranks[1].process.send_signal(signal.SIGCONT)
    eventually("ready again", lambda: found().ready)
    ranks[1].say("come")
    for rank in ranks:
        assert rank.hear(60)["error"] == ""
