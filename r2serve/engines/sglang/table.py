"""The hooks in SGLang: target, kind and our function; ``relies_on.py`` says what each is for.

This module imports nothing from SGLang, torch or the core.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_OURS = "r2serve.engines.sglang"
_STATE = "sglang.srt.distributed.parallel_state"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"

RESOLUTION_STEP = "handle_other_validations"
"""Step of SGLang's configuration with r2serve's checks: all options are known, no process runs."""


@dataclass(frozen=True)
class Hook:
    """A hook; ``kind`` is a name of SGLang's HookType, ``function`` is ``module:name``."""

    target: str
    kind: str
    function: str

    def load(self) -> Callable[..., Any]:
        """Imports and returns our function."""
        module, _, name = self.function.partition(":")
        loaded: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return loaded


HOOKS = (
    Hook("sglang.srt.server_args.ServerArgs.add_cli_args", "AFTER", f"{_OURS}.hooks:add_flag"),
    Hook(f"{_STATE}.get_default_distributed_backend", "AROUND", f"{_OURS}.groups:default_backend"),
    Hook("torch.distributed.new_group", "AROUND", f"{_OURS}.groups:new_group"),
    Hook("torch.distributed.monitored_barrier", "AROUND", f"{_OURS}.groups:monitored_barrier"),
    Hook(f"{_STATE}.GroupCoordinator.__init__", "AFTER", f"{_OURS}.groups:connect"),
    Hook(f"{_STATE}.GroupCoordinator.all_reduce", "AROUND", f"{_OURS}.groups:all_reduce"),
    Hook(f"{_STATE}.GroupCoordinator.all_gather", "AROUND", f"{_OURS}.groups:all_gather"),
    Hook(f"{_SCHEDULER}.run_event_loop", "AROUND", f"{_OURS}.timings:run_event_loop"),
    Hook(f"{_SCHEDULER}.run_batch", "AROUND", f"{_OURS}.steps:run_batch"),
    Hook(f"{_SCHEDULER}.process_batch_result", "AROUND", f"{_OURS}.steps:process_batch_result"),
    Hook(f"{_SCHEDULER}.ingest_requests", "AROUND", f"{_OURS}.steps:ingest_requests"),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_batch_output",
        "AROUND",
        f"{_OURS}.timings:handle_batch_output",
    ),
)

PYNCCL = Hook(
    "sglang.srt.distributed.device_communicators.pynccl.PyNcclCommunicator",
    "REPLACE",
    f"{_OURS}.pynccl:R2cclPyNccl",
)
"""Replaced only in processes with the choice r2ccl."""
