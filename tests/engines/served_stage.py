"""A lab with a model, and servers of an engine over its two nodes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from r2serve.lab.holder import LabUnavailableError
from r2serve.lab.injector import LabInjector
from r2serve.lab.lab import Lab
from r2serve.lab.serving.client import Load, Run
from r2serve.lab.serving.model import make_tiny_llama, prompts
from r2serve.lab.serving.places import LabPlace
from r2serve.lab.serving.plan import Plan
from r2serve.lab.serving.serve import Server

STREAMS, TOKENS = 4, 600
SILENCE_S = 120.0
FAULT_S = 3.0


def tokens_of(run: Run) -> list[tuple[int, ...]]:
    """Returns the tokens of each request, none of which may fail."""
    assert run.failed == 0, [request.error for request in run.requests]
    return [request.token_ids for request in run.requests]


class Stage:
    """A lab with a model; servers start one after another, or with different labels."""

    def __init__(self, lab: Lab, work: Path, engine: str) -> None:
        self.lab, self.work, self.engine = lab, work, engine
        self.model = make_tiny_llama(work / "model")
        self.texts = prompts(STREAMS)
        self.injector = LabInjector(lab)

    def server(
        self,
        *,
        r2ccl: bool = True,
        label: str | None = None,
        model: Path | None = None,
        **changes: Any,
    ) -> Server:
        """Returns a server, not started yet; ``changes``: further fields of Plan."""
        plan = Plan(
            label or ("r2ccl" if r2ccl else "gloo"),
            model or self.model,
            r2ccl,
            True,
            self.work,
            STREAMS,
            engine=self.engine,
            **changes,
        )
        return Server(plan, [LabPlace(node) for node in self.lab.nodes])

    def load(self, server: Server, label: str) -> Load:
        """Begins to run all texts."""
        path = self.work / f"{server.plan.label}-{label}.json"
        return Load(server.client, server.url, self.texts, TOKENS, path)

    def run(self, server: Server, label: str) -> Run:
        """Runs all texts without a fault."""
        return self.load(server, label).finish(SILENCE_S, server.check_alive)

    def struck_run(self, server: Server, label: str, kind: str, node: int, rail: int | None) -> Run:
        """Runs all texts; a fault strikes during decoding, and ends before the last token."""
        load = self.load(server, label)
        load.wait_for_tokens(STREAMS * 32, SILENCE_S)
        self.injector.make(kind, node, rail)
        try:
            time.sleep(FAULT_S)
            goes_on(load, 8)
        finally:
            self.injector.undo(kind, node, rail)
        return load.finish(SILENCE_S, server.check_alive)


def goes_on(load: Load, tokens: int = 16) -> None:
    """Waits for further tokens of each stream, after a fault."""
    assert load.running, "the fault came after the last token: use more tokens"
    load.wait_for_tokens(load.tokens + STREAMS * tokens, SILENCE_S)


@contextmanager
def a_stage(engine: str) -> Iterator[Stage]:
    """Yields a stage with two rails; skips the test on a machine without labs."""
    with ExitStack() as stack:
        # Sockets of the engine have long names, so the folder has a short one.
        work = Path(stack.enter_context(TemporaryDirectory(prefix="r2s-")))
        try:
            lab = stack.enter_context(Lab(nodes=2, rails=2))
        except LabUnavailableError as error:
            pytest.skip(f"no lab on this machine: {error}")
        yield Stage(lab, work, engine)
