"""A plugin of SGLang for tests: rank 1 leaves out a broadcast of requests.

The rank obeys when the file ``$R2SERVE_TEST_SKIP`` exists, and deletes the file.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

OBEYS = 1
"""The rank of the tensor-parallel group."""
ORDER = Path(os.environ.get("R2SERVE_TEST_SKIP", "/nonexistent"))
TARGET = "sglang.srt.managers.scheduler_components.request_receiver.broadcast_pyobj"


def install() -> None:
    """Registers the hook; SGLang calls this in every process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, broadcast, HookType.AROUND)


def broadcast(original: Callable[..., Any], data: Any, rank: int, *args: Any, **named: Any) -> Any:
    """Broadcasts the requests, or returns none without a call."""
    if rank != OBEYS or not ORDER.exists():
        return original(data, rank, *args, **named)
    ORDER.unlink()
    return []
