"""A server over the nodes of a lab whose command lines or options differ: its end on each node."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from timely import ended, timely

from r2serve.engines import flag
from r2serve.lab.lab import Lab
from r2serve.lab.serving.places import LabPlace, Place
from r2serve.lab.serving.plan import Plan
from r2serve.lab.serving.serve import Server

WITHIN_S = 60.0
FLAG = f"--distributed-backend ({flag.VARIABLE})"
WITH: dict[str, Any] = {"r2ccl": True}
WITHOUT: dict[str, Any] = {"r2ccl": False}
CHECKED = WITH | {"settings": {"R2CCL_CHECKSUM": "on"}}
DIFFERENCES = {
    "the flag on node 0": ((WITH, WITHOUT), FLAG, ("r2ccl", "default")),
    "the flag on node 1": ((WITHOUT, WITH), FLAG, ("default", "r2ccl")),
    "an option": ((WITH, CHECKED), "checksum (R2CCL_CHECKSUM)", ("off", "on")),
}
"""Changes of the plan of each node, the name of the value, and the value of each node."""


class Differing(Server):
    """A server whose nodes have a plan each."""

    def __init__(self, plans: Sequence[Plan], places: Sequence[Place]) -> None:
        super().__init__(plans[0], places)
        self._plans = plans

    def _start(self, index: int, place: Place) -> None:
        self.plan = self._plans[index]
        super()._start(index, place)


def check_end(
    lab: Lab, plan: Plan, changes: Sequence[Mapping[str, Any]], name: str, values: Sequence[str]
) -> None:
    """Starts a server, and checks that each node ends with a status and one sentence, in time.

    changes: fields of `plan` that each node has instead. name, values: of the value that differs.
    """
    plans = [dataclasses.replace(plan, **change) for change in changes]
    began = time.monotonic()
    with Differing(plans, [LabPlace(node) for node in lab.nodes]) as server:
        statuses = [ended(process, "a node", within_s=240) for process in server._processes]
        took_s = time.monotonic() - began
        logs = [server.log_path(node).read_text(errors="replace") for node in (0, 1)]
    # The ranks, one a node, may be faster with their own comparison of options.
    sentence = [re.escape(f"{name} is ")]
    for node, value in enumerate(values):
        sentence.append(rf"{re.escape(repr(value))} on (node|rank) {node} \(host [^)]+\)")
    for status, log in zip(statuses, logs, strict=True):
        assert status != 0, log[-3000:]
        lines = [
            line for line in log.splitlines() if all(re.search(part, line) for part in sentence)
        ]
        assert lines, log[-3000:]
    timely(lambda: took_s < WITHIN_S, f"the nodes ended after {took_s:.1f} s", 0)
