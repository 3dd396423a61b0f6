"""Processes that tests start as forks."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
from forked import Forked


def test_a_signal_to_a_process_that_has_just_ended_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process may end, and its parent may wait for it, after poll() has seen it run."""

    def gone(pid: int, number: int) -> None:
        raise ProcessLookupError

    process: Any = Forked.__new__(Forked)
    process.pid, process.returncode = 4_000_000, None
    process._forks = SimpleNamespace(ended=lambda pid, timeout: None)
    monkeypatch.setattr(os, "kill", gone)
    process.send_signal(signal.SIGCONT)
