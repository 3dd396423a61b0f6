"""What clients saw of each request, from vLLM's statistics.

vLLM loads :class:`RequestTimings` (entry point group ``vllm.stat_logger_plugins``) in the process
that serves HTTP, also when nobody asked for r2ccl.  Then it does nothing, but that it is there
makes vLLM collect statistics under ``--disable-log-stats``, too; ``VLLM_PLUGINS`` can leave it out.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from pathlib import Path
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from r2serve.engines.vllm import flag
from r2serve.observe.request_log import LONGEST_NAME, RequestLog

_LOG = logging.getLogger(__name__)


class RequestTimings(StatLoggerBase):  # type: ignore[misc]
    """Writes a line for each request that has ended into the folder of the journals."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._log: RequestLog | None = None
        folder = os.environ.get("R2CCL_JOURNAL_DIR")
        if not flag.active() or not folder:
            return
        name = f"frontend-{os.getpid()}-{secrets.token_hex(4)}.requests"
        try:
            self._log = RequestLog(
                Path(folder) / name, writer="frontend", label=f"engine {engine_index}"
            )
        except OSError as error:
            _LOG.warning("what clients see of requests is not noted: %s", error)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """After each iteration of the engine."""
        if self._log is None or iteration_stats is None:
            return
        try:
            for ended in iteration_stats.finished_requests:
                self._log.write(_line(ended))
        except Exception:  # noqa: BLE001  vLLM would end every request for it
            _LOG.exception("what clients see of requests is not noted any more")
            self._log = None

    def log_engine_initialized(self) -> None:
        """Nothing to say."""


def _line(ended: Any) -> dict[str, Any]:
    return {
        "finished": ended.request_id[:LONGEST_NAME],
        "reason": str(ended.finish_reason),
        "prompt_tokens": ended.num_prompt_tokens,
        "tokens": ended.num_generation_tokens,
        "queued_s": ended.queued_time,
        "prefill_s": ended.prefill_time,
        "decode_s": ended.decode_time,
        "e2e_s": ended.e2e_latency,
        "ended_ns": time.monotonic_ns(),
        "ended_clock_ns": time.time_ns(),
    }
