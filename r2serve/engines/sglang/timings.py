"""Timings of each request as seen by clients, from SGLang's first process; the end of its start.

The first hook reads the time stamps that SGLang keeps for every request, with or without metrics.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from r2serve.config import Config
from r2serve.engines import flag, without_rails
from r2serve.engines.sglang.steps import ENGINE, HEALTH_CHECK
from r2serve.errors import ConfigError
from r2serve.observe import files
from r2serve.observe.names import request_name
from r2serve.observe.request_log import RequestLog

_LOG = logging.getLogger(__name__)

_STATE = "r2serve_request_log"


async def handle_batch_output(
    original: Callable[[Any, Any], Awaitable[None]], manager: Any, output: Any
) -> None:
    """Hook around ``TokenizerManager._handle_batch_output``: logs the requests that end in it."""
    log = _log_of(manager)
    if log is None:
        return await original(manager, output)
    ending = [
        (index, rid, state)
        for index, rid in enumerate(output.rids)
        if output.finished_reasons[index] is not None
        and not rid.startswith(HEALTH_CHECK)
        and (state := manager.rid_to_state.get(rid)) is not None
    ]
    await original(manager, output)
    try:
        for index, rid, state in ending:
            log.write(line(rid, output, index, state.time_stats))
    except OSError as error:  # the journal's folder is full, or gone
        _LOG.warning("request timings are disabled: %s", error)
        setattr(manager, _STATE, None)
    except Exception:  # noqa: BLE001  an error here would end every request
        _LOG.exception("request timings are disabled after an error")
        setattr(manager, _STATE, None)
    return None


def run_event_loop(original: Callable[..., Any], scheduler: Any, *args: Any, **kw: Any) -> Any:
    """Hook around ``Scheduler.run_event_loop``: the model is loaded, and requests may come.

    With ``--skip-server-warmup`` an engine without rails has no output to be seen by before its
    first request, and its probe would keep this request away.
    """
    if flag.active() and not flag.spans_nodes() and _is_first_rank():
        without_rails.tell_once(f"engine {ENGINE}")
    return original(scheduler, *args, **kw)


def _is_first_rank() -> bool:
    """Whether this scheduler is rank 0 of torch's default group, or the only one."""
    import torch.distributed as dist

    return not dist.is_initialized() or dist.get_rank() == 0


def _log_of(manager: Any) -> RequestLog | None:
    """Returns the manager's log, made on first use; None: not wanted, or not possible."""
    if _STATE in manager.__dict__:
        kept: RequestLog | None = manager.__dict__[_STATE]
        return kept
    made = None
    folder = os.environ.get("R2CCL_JOURNAL_DIR")
    if flag.active() and folder:
        without_rails.tell_once(f"engine {ENGINE}")  # if no scheduler has told
        path = Path(folder) / f"frontend-{os.getpid()}-{secrets.token_hex(4)}.requests"
        try:
            config = Config.from_env()
            made = RequestLog(
                path,
                writer="frontend",
                label=f"engine {ENGINE}",
                serving_engine=config.serving_engine,
                room_for=partial(files.room_for, folder, limit_bytes=config.journal_limit_bytes),
            )
        except (OSError, ConfigError) as error:
            _LOG.warning("request timings are disabled: %s", error)
    setattr(manager, _STATE, made)
    return made


def line(rid: str, output: Any, index: int, stats: Any) -> dict[str, Any]:
    """Returns the log's line about a finished request.

    Args:
        output: SGLang's output of several requests; ``index``: position of the request.
        stats: SGLang's time stamps of the request, s of ``time.perf_counter``. The time in the
            queue is part of the time to the first token.
    """
    finished_s = stats.finished_time or time.perf_counter()
    first_s = stats.first_token_time or finished_s
    reason = output.finished_reasons[index]
    return {
        "finished": request_name(rid),
        "reason": str(reason.get("type", "") if isinstance(reason, dict) else reason),
        "prompt_tokens": output.prompt_tokens[index],
        "tokens": getattr(output, "completion_tokens", [0] * (index + 1))[index],
        "queued_s": 0.0,
        "prefill_s": first_s - stats.created_time,
        "decode_s": finished_s - first_s,
        "e2e_s": finished_s - stats.created_time,
        "ended_ns": time.monotonic_ns(),
        "ended_clock_ns": time.time_ns(),
    }
