"""Progress of the demo where no line can be replaced, as in a log."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from r2serve.lab.serving import progress
from r2serve.lab.serving.progress import Progress


def test_a_long_step_has_a_line_at_each_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s[0])
    output = io.StringIO()
    shown = Progress(Console(file=output, width=160))
    with shown.step("serving"):
        for second in range(40):
            now_s[0] = 100.0 + second
            shown.detail(f"{second} tokens")
    lines = [line.split("s  ", 1)[1] for line in output.getvalue().splitlines()]
    assert lines == ["serving", "serving: 15 tokens", "serving: 30 tokens"]
