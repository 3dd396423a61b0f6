"""`vllm serve` on two nodes of a lab whose command lines or options differ."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from timely import ended, timely

from r2serve.engines import flag
from r2serve.lab.holder import LabUnavailableError
from r2serve.lab.lab import Lab
from r2serve.lab.serving.model import make_tiny_llama
from r2serve.lab.serving.places import LabPlace, Place
from r2serve.lab.serving.plan import Plan
from r2serve.lab.serving.serve import Server

WITHIN_S = 60.0
FLAG = f"--distributed-backend ({flag.VARIABLE})"
WITH: dict[str, Any] = {"r2ccl": True}
WITHOUT: dict[str, Any] = {"r2ccl": False}
CHECKED = WITH | {"settings": {"R2CCL_CHECKSUM": "on"}}


class Differing(Server):
    """A server whose nodes have a plan each."""

    def __init__(self, plans: Sequence[Plan], places: Sequence[Place]) -> None:
        super().__init__(plans[0], places)
        self._plans = plans

    def _start(self, index: int, place: Place) -> None:
        self.plan = self._plans[index]
        super()._start(index, place)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.case("22", "the nodes waited for each other, and named no value")
@pytest.mark.parametrize(
    ("changes", "name", "values"),
    [
        ((WITH, WITHOUT), FLAG, ("r2ccl", "default")),
        ((WITHOUT, WITH), FLAG, ("default", "r2ccl")),
        ((WITH, CHECKED), "checksum (R2CCL_CHECKSUM)", ("off", "on")),
    ],
    ids=["the flag on node 0", "the flag on node 1", "an option"],
)
def test_nodes_that_differ_end_and_say_so(
    changes: tuple[dict[str, Any], ...], name: str, values: tuple[str, str]
) -> None:
    with ExitStack() as stack:
        work = Path(stack.enter_context(TemporaryDirectory(prefix="r2s-")))
        try:
            lab = stack.enter_context(Lab(nodes=2, rails=2))
        except LabUnavailableError as error:
            pytest.skip(f"no lab on this machine: {error}")
        model = make_tiny_llama(work / "model")
        plan = Plan("nodes", model, r2ccl=True, lab=True, work=work, max_requests=4)
        plans = [dataclasses.replace(plan, **change) for change in changes]
        began = time.monotonic()
        server = stack.enter_context(Differing(plans, [LabPlace(node) for node in lab.nodes]))
        statuses = [ended(process, "a node", within_s=240) for process in server._processes]
        took_s = time.monotonic() - began
        logs = [server.log_path(node).read_text(errors="replace") for node in (0, 1)]
    sentence = [f"{name} is ", *(f"{each!r} on node {node}" for node, each in enumerate(values))]
    for status, log in zip(statuses, logs, strict=True):
        assert status != 0, log[-3000:]
        lines = [line for line in log.splitlines() if all(part in line for part in sentence)]
        assert lines, log[-3000:]
    timely(lambda: took_s < WITHIN_S, f"the nodes ended after {took_s:.1f} s", 0)
