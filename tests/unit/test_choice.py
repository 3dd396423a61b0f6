"""The choice of an all-reduce: read from a journal, and shown by ``r2serve rails``."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from played_steps import GROUP

from r2serve.cli import main
from r2serve.observe import health, live
from r2serve.observe.choice import NO_CHOICE, Choice, lines
from r2serve.observe.journal import Journal, RailCounters
from r2serve.observe.watch import Worker

UNEVEN = Choice("two_shot", "size", "loss", 8)


@pytest.mark.parametrize(
    ("data", "choice", "text"),
    [
        (b"\0\0\0\0", NO_CHOICE, ""),
        (b"\1\1\0\0", Choice("one_shot", "given", "", 0), "one_shot as the caller or R2CCL"),
        (b"\2\2\1\0", Choice("two_shot", "size", "no_loss", 0), "two_shot by size, even shares"),
        (b"\2\2\2\4", Choice("two_shot", "size", "no_gain", 4), "others gain nothing"),
        (b"\2\3\3\7", Choice("two_shot", "loss", "few_blocks", 7), "because of the loss, even"),
        (b"\2\2\4\10", UNEVEN, "two_shot by size, uneven shares"),
        (b"\x09\x09\x09\x0f", Choice(*["unknown"] * 3, 15), "unknown, unknown"),
    ],
)
def test_a_choice_is_read_and_told(data: bytes, choice: Choice, text: str) -> None:
    assert Choice.parse(data) == choice
    assert text in choice.text


def test_lines_tell_choices_under_a_loss_once() -> None:
    few = Choice("two_shot", "loss", "few_blocks", 8)
    told = lines([("tp:0", UNEVEN), ("dp:0", NO_CHOICE), ("tp:0", UNEVEN), ("tp:0", few)])
    assert told == [
        "tp:0: a node lacks 8/16 of its bandwidth; last all_reduce: two_shot by size, "
        "uneven shares",
        "tp:0: a node lacks 8/16 of its bandwidth; last all_reduce: two_shot because of the loss, "
        "even shares: too few blocks for others",
    ]
    assert lines([("tp:0", replace(UNEVEN, lost=0)), ("tp:0", NO_CHOICE)]) == []


def test_rails_shows_the_choice_under_a_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values: dict[str, Any] = dict.fromkeys((field.name for field in fields(RailCounters)), 0)
    values |= {"name": "rail0@node1", "kind": "tcp", "peer": "rank 1", "device": "eth0"}
    values |= {"state": "UP", "cause": "none", "verdict": "none", "never_up": "", "drill": ""}
    group = replace(GROUP, choice=UNEVEN)
    groups = [group, replace(group, name="gone", closed=True)]
    read = Journal(process=1, rails=[RailCounters(**values)], groups=groups)
    some = [Worker(key, tmp_path, 0, read) for key in ("1-a", "2-a")]
    watch = SimpleNamespace(live=lambda: some, host="h", folder=tmp_path)
    monkeypatch.setattr(live, "_look", lambda _: watch)
    monkeypatch.setattr(health, "examine", lambda _: health.Health(health.OK))
    done = CliRunner().invoke(main, ["rails", "--journal-dir", str(tmp_path)])
    assert done.exit_code == 0, done.output
    text = " ".join(done.output.split())
    assert text.count("a node lacks 8/16") == 1
    assert "tp:0: a node lacks 8/16 of its bandwidth; last all_reduce: two_shot" in text
