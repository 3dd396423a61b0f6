"""Records the end of each step, in the engine's own processes.

A copy of this file is the ``sitecustomize`` of the engine's interpreters, which therefore imports
nothing of r2serve. A process appends records to ``PID.steps`` in the folder that the variable
``R2SERVE_BENCH_STEPS`` names. A record has two numbers, in ns: the time of the end
(CLOCK_MONOTONIC), and the longest time since the step before of any request of this step.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import struct
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

FOLDER = "R2SERVE_BENCH_STEPS"
RECORD = struct.Struct("=qq")
MOST = 4096
"""Largest number of requests with a known last step."""


class Recorder:
    """Writes the records of this process; a forked child has a file of its own."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._process = 0
        self._file = -1
        self._last_ns: dict[str, int] = {}

    def ended(self, requests: Iterable[str]) -> None:
        """Records the end of a step with these requests, by id."""
        now_ns = time.monotonic_ns()
        if self._process != os.getpid():
            self._process = os.getpid()
            path = os.path.join(self._folder, f"{self._process}.steps")
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(path, flags, 0o600)
        longest_ns = 0
        for one in requests:
            # A request moves to the end, so that the first is the one with the oldest step.
            before_ns = self._last_ns.pop(one, now_ns)
            longest_ns = max(longest_ns, now_ns - before_ns)
            self._last_ns[one] = now_ns
        while len(self._last_ns) > MOST:
            self._last_ns.pop(next(iter(self._last_ns)))
        os.write(self._file, RECORD.pack(now_ns, longest_ns))


def requests_of_vllm(scheduled: Any) -> Iterable[str]:
    return list(scheduled.num_scheduled_tokens)


def requests_of_sglang(batch: Any) -> Iterable[str]:
    return [request.rid for request in batch.reqs]


RequestsOf = Callable[[Any], Iterable[str]]
STEPS: dict[str, tuple[str, str, RequestsOf]] = {
    "vllm.v1.worker.worker_base": ("WorkerWrapperBase", "execute_model", requests_of_vllm),
    "sglang.srt.managers.scheduler": ("Scheduler", "process_batch_result", requests_of_sglang),
}
"""The method at whose end a step has ended, by module; its first argument has the requests."""


def wrap(kind: type[Any], name: str, requests_of: RequestsOf, recorder: Recorder) -> None:
    """Makes a method record its ends. Raises AttributeError if the class lacks the method."""
    method = getattr(kind, name)

    def recorded(self: Any, step: Any, *rest: Any, **named: Any) -> Any:
        requests = requests_of(step)
        result = method(self, step, *rest, **named)
        if requests:
            recorder.ended(requests)
        return result

    setattr(kind, name, recorded)


class AfterImport:
    """Finds the modules of STEPS as Python would, and wraps the method after the import."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in STEPS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        loader = spec.loader if spec is not None else None
        if loader is None:
            return None
        execute = loader.exec_module
        kind, method, requests_of = STEPS[name]

        def execute_and_wrap(module: ModuleType) -> None:
            execute(module)
            wrap(getattr(module, kind), method, requests_of, self._recorder)

        loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec


def begin() -> None:
    """Watches this interpreter, and runs the ``sitecustomize`` that this copy hides."""
    sys.meta_path.insert(0, AfterImport(Recorder(os.environ[FOLDER])))
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != own]
    this = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
    sys.modules.setdefault("sitecustomize", this)


if __name__ == "sitecustomize" and FOLDER in os.environ:
    begin()
