"""Timings of each request as seen by clients, from vLLM's statistics.

vLLM loads :class:`RequestTimings` (entry point group ``vllm.stat_logger_plugins``) in the HTTP
server's process, even without the flag; then the class does nothing. A loaded class makes vLLM
collect statistics in spite of ``--disable-log-stats``; ``VLLM_PLUGINS`` can exclude the class.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from functools import partial
from pathlib import Path
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from r2serve.config import Config
from r2serve.engines import flag, without_rails
from r2serve.engines.vllm.request_ids import answer_name
from r2serve.errors import ConfigError
from r2serve.observe import files
from r2serve.observe.names import request_name
from r2serve.observe.request_log import RequestLog
from r2serve.variables import RELAY

_LOG = logging.getLogger(__name__)


class RequestTimings(StatLoggerBase):  # type: ignore[misc]
    """Writes a line for each finished request into the journal folder."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._log: RequestLog | None = None
        self._label = f"engine {engine_index}"
        folder = os.environ.get("R2CCL_JOURNAL_DIR")
        if not flag.active() or not folder:
            return
        name = f"frontend-{os.getpid()}-{secrets.token_hex(4)}.requests"
        try:
            config = Config.from_env()
            self._log = RequestLog(
                Path(folder) / name,
                writer="frontend",
                label=self._label,
                serving_engine=config.serving_engine,
                room_for=partial(files.room_for, folder, limit_bytes=config.journal_limit_bytes),
            )
        except (OSError, ConfigError) as error:
            _LOG.warning("request timings are disabled: %s", error)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Records the requests finished in an iteration of the engine."""
        if self._log is None or iteration_stats is None:
            return
        try:
            for ended in iteration_stats.finished_requests:
                self._log.write(_line(ended))
        except OSError as error:
            _LOG.warning("request timings are disabled: %s", error)
            self._log = None
        except Exception:  # noqa: BLE001  an error here would end every request of vLLM
            _LOG.exception("request timings are disabled after an error")
            self._log = None

    def log_engine_initialized(self) -> None:
        """Tells the relay of this node, and sidecars without journals, that the engine is up."""
        if flag.active():
            without_rails.tell_once(self._label)
        if os.environ.get(RELAY):
            from r2serve.engines.vllm import control

            control.started()


def _line(ended: Any) -> dict[str, Any]:
    return {
        "finished": request_name(answer_name(ended.request_id)),
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
