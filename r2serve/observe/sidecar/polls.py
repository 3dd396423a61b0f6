"""Polls of the sidecar that outlive their failures.

A task that ends with an exception says nothing by itself, and the page would keep its last state.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from r2serve.observe.names import printable

_LOG = logging.getLogger("r2serve.sidecar")

AGAIN_S = 1.0
TELL_AGAIN_S = 60.0
"""Pause between two log entries about the same failure, s."""
_LONGEST_WHY = 200


async def keep_polling(
    what: str, poll: Callable[[], Awaitable[object]], failed: Callable[[str], None]
) -> None:
    """Runs ``poll`` until cancelled; begins again AGAIN_S after each end.

    ``failed`` is called with a text for the page after each end.
    """
    told, told_at_s = "", 0.0
    while True:
        error: Exception | None = None
        try:
            await poll()
        except Exception as caught:  # noqa: BLE001  of any kind; the next try may succeed
            error = caught
        why = "the poll has ended" if error is None else said(error)
        now_s = time.monotonic()
        if why != told or now_s - told_at_s > TELL_AGAIN_S:
            told, told_at_s = why, now_s
            _LOG.error("%s: %s; tries again every %g s", what, why, AGAIN_S, exc_info=error)
        failed(f"{what}: {why}")
        await asyncio.sleep(AGAIN_S)


def said(error: Exception) -> str:
    """Returns kind and first line of an error, short and printable."""
    first = f"{type(error).__name__}: {error}".splitlines()[0]
    return printable(first)[:_LONGEST_WHY]
