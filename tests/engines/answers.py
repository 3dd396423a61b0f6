"""Flags, rails and prompts with which the tests start and query engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from r2serve.lab.serving.model import prompts

if TYPE_CHECKING:
    from conftest import Engine

FLAG = ["--distributed-backend", "r2ccl"]
RAILS = {"R2CCL_RAILS": "127.0.0.1,127.0.0.2"}
TOKENS = 48
PROMPTS = prompts(3)


def greedy(engine: Engine) -> list[str]:
    """Returns the text generated after each prompt."""
    answers = [engine.complete(prompt, TOKENS) for prompt in PROMPTS]
    assert [status for status, _ in answers] == [200] * len(PROMPTS)
    # A token is a word, except for the few special tokens, which have no text.
    assert all(TOKENS - 4 <= len(text.split()) <= TOKENS for _, text in answers)
    return [text for _, text in answers]
