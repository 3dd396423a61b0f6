"""A worker extension for tests: one rank leaves out a collective call of one step.

The call is the first, middle or last of the step, by the word in the file ``$R2SERVE_TEST_SKIP``,
which the rank deletes when it obeys.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from r2serve.engines.vllm import compared
from r2serve.engines.vllm.communicator import SpanningCpuCommunicator

ORDER = Path(os.environ.get("R2SERVE_TEST_SKIP", "/nonexistent"))


class Extension:
    """Adds nothing to the worker; vLLM imports this module for its sake."""


class Skipping:
    calls = 0
    usual = 0
    skipped = -1

    def began(self) -> None:
        self.usual, self.calls, self.skipped = self.calls, 0, -1
        if ORDER.exists():
            self.skipped = {"first": 0, "middle": self.usual // 2, "last": self.usual - 1}[
                ORDER.read_text()
            ]
            ORDER.unlink()

    def around(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: Any, input_: Any, *more: Any, **named: Any) -> Any:
            self.calls += 1
            if self.calls - 1 != self.skipped:
                return real(group, input_, *more, **named)
            return None if real.__name__ == "gather" else input_

        return call


if "R2SERVE_TEST_SKIP" in os.environ:
    skipping = Skipping()
    began = compared.ComparedSteps.began

    def counted(self: compared.ComparedSteps, *given: Any) -> None:
        skipping.began()
        began(self, *given)

    compared.ComparedSteps.began = counted  # type: ignore[method-assign]
    for name in ("all_reduce", "gather"):
        real = getattr(SpanningCpuCommunicator, name)
        setattr(SpanningCpuCommunicator, name, skipping.around(real))
