"""A lab with a model, and servers of SGLang over its two nodes."""

from __future__ import annotations

import time
from pathlib import Path

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
    """A lab with a model; servers start one after another."""

    def __init__(self, lab: Lab, work: Path) -> None:
        self.lab, self.work = lab, work
        self.model = make_tiny_llama(work / "model")
        self.texts = prompts(STREAMS)
        self.injector = LabInjector(lab)

    def server(self, *, r2ccl: bool, tensor: int = 2, pipeline: int = 1) -> Server:
        plan = Plan(
            "r2ccl" if r2ccl else "gloo",
            self.model,
            r2ccl,
            True,
            self.work,
            STREAMS,
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
            engine="sglang",
        )
        return Server(plan, [LabPlace(node) for node in self.lab.nodes])

    def run(self, server: Server, label: str) -> Run:
        """Runs all texts without a fault."""
        load = Load(server.client, server.url, self.texts, TOKENS, self.work / f"{label}.json")
        return load.finish(SILENCE_S, server.check_alive)

    def struck_run(self, server: Server, label: str, kind: str, node: int, rail: int | None) -> Run:
        """Runs all texts; a fault strikes during decoding, and ends before the last token."""
        path = self.work / f"{label}.json"
        load = Load(server.client, server.url, self.texts, TOKENS, path)
        load.wait_for_tokens(STREAMS * 32, SILENCE_S)
        self.injector.make(kind, node, rail)
        try:
            time.sleep(FAULT_S)
            assert load.running, "the fault came after the last token: use more tokens"
            before = load.tokens
            load.wait_for_tokens(before + STREAMS * 8, SILENCE_S)
        finally:
            self.injector.undo(kind, node, rail)
        return load.finish(SILENCE_S, server.check_alive)
