"""Steps of a scheduler: reports to :mod:`r2serve.observe.attribution`, and comparison of positions.

SGLang begins a step (``run_batch``) before it processes the result of the step before. The
broadcast of new requests is before a step and has its number; a stall there delays all running
requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import islice
from typing import Any

from r2serve import process
from r2serve.communicator import Communicator
from r2serve.config import Config
from r2serve.device import check_all, wake_all
from r2serve.engines import flag
from r2serve.engines.sglang.groups import COMMUNICATOR
from r2serve.errors import R2cclError
from r2serve.observe.attribution import Attribution, NewRequest, Step, next_step
from r2serve.observe.names import request_name

_LOG = logging.getLogger(__name__)

ENGINE = "sglang"
HEALTH_CHECK = "HEALTH_CHECK"
"""Prefix of the ids of SGLang's own health requests, which belong to no client."""
BROADCAST = -1
"""Key of the broadcast of requests; steps have SGLang's positive numbers as keys."""
_NAMED_REQUESTS = 3
_STEPS = "r2serve_steps"


def run_batch(
    original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kw: Any
) -> Any:
    """Hook around ``Scheduler.run_batch``: a step begins; on CPUs also the forward pass ends."""
    steps = _steps_of(scheduler)
    if steps is None:
        return original(scheduler, batch, *args, **kw)
    number = scheduler.forward_ct + 1  # SGLang increments its counter inside
    steps.began(batch, number)
    wake_all()
    result = original(scheduler, batch, *args, **kw)
    steps.computed(number)
    return result


def process_batch_result(
    original: Callable[..., Any], scheduler: Any, batch: Any, result: Any, *args: Any, **kw: Any
) -> Any:
    """Hook around ``Scheduler.process_batch_result``: tokens leave the scheduler."""
    steps = _steps_of(scheduler)
    if steps is None:
        return original(scheduler, batch, result, *args, **kw)
    steps.check(result)
    processed = original(scheduler, batch, result, *args, **kw)
    steps.ended(batch)
    return processed


def ingest_requests(original: Callable[..., Any], scheduler: Any, *args: Any, **kw: Any) -> Any:
    """Hook around ``Scheduler.ingest_requests``: the broadcast of new requests."""
    steps = _steps_of(scheduler)
    running = None if steps is None else scheduler.running_batch
    if steps is None or not getattr(running, "reqs", None):
        return original(scheduler, *args, **kw)
    steps.broadcast_began(running, scheduler.forward_ct + 1)
    ingested = original(scheduler, *args, **kw)
    steps.broadcast_ended()
    return ingested


def _steps_of(scheduler: Any) -> FollowedSteps | None:
    """Returns the steps of a scheduler; None: r2ccl carries no group of this process."""
    if not flag.spans_nodes():
        return None
    found: FollowedSteps | None = scheduler.__dict__.get(_STEPS)
    if found is None:
        found = FollowedSteps(_about(scheduler), _compared(scheduler))
        setattr(scheduler, _STEPS, found)
    return found


def _about(scheduler: Any) -> dict[str, str]:
    """Returns the labels of the worker in r2serve's metrics."""
    from sglang.srt.arg_groups.overrides import resolving_view

    options = resolving_view(scheduler.server_args)
    return {"model_name": str(options.served_model_name), "engine": ENGINE}


def _compared(scheduler: Any) -> Communicator | None:
    """Returns the communicator of the tensor-parallel group, if its ranks run equal steps.

    With data-parallel attention, ranks of the group count different steps.
    """
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.distributed.parallel_state import get_tp_group

    if resolving_view(scheduler.server_args).attn_dp_size > 1:
        return None
    communicator: Communicator | None = getattr(get_tp_group(), COMMUNICATOR, None)
    return communicator


class FollowedSteps:
    """The steps of a scheduler. An error in a report never fails a step."""

    def __init__(self, about: dict[str, str], compared: Communicator | None) -> None:
        """``about``: labels of metrics. ``compared``: ranks with equal steps; None: no comparison.

        A comparison makes a collective that one rank skips an error in the same step, before its
        tokens leave the schedulers.
        """
        self._attribution = Attribution(
            lambda: [each.engine for each in process.opened()],
            about,
            journal_limit_bytes=Config.from_env().journal_limit_bytes,
        )
        self._compared = compared
        self._finished: list[str] = []
        self._lost = False

    def began(self, batch: Any, number: int) -> None:
        """Begins step ``number`` of SGLang's ScheduleBatch.

        Raises:
            R2cclError: the ranks have parted in the step before, or the group has failed.
        """
        self._guarded(lambda: self._begin(batch, number))
        if self._compared is not None:
            self._compared.step(next_step(number - 1), named(batch))

    def _begin(self, batch: Any, number: int) -> None:
        finished, self._finished = self._finished, []
        self._attribution.began(step_of(next_step(number - 1), batch, finished), number)

    def computed(self, number: int) -> None:
        """Ends the launch of a step; on CPUs the forward pass is complete.

        Raises:
            R2cclError: the group has failed.
        """
        self._guarded(lambda: self._attribution.ended(sampled=False, key=number))
        if self._compared is not None:
            self._compared.post_position()

    def check(self, result: Any) -> None:
        """Waits for the tokens of a step, and checks that all ranks and peers took part.

        Kernels of a GPU end without results after the loss of a peer.

        Raises:
            R2cclError: the reason why the tokens must not leave.
        """
        copied = getattr(result, "copy_done", None)
        if copied is not None:
            copied.synchronize()
        check_all()
        if self._compared is not None:
            self._compared.end_step()

    def ended(self, batch: Any) -> None:
        """Ends the step of a batch, after its tokens have left the scheduler."""
        self._guarded(lambda: self._end(batch))

    def _end(self, batch: Any) -> None:
        self._attribution.ended(sampled=True, key=batch.forward_iter)
        self._finished += [each.rid for each in batch.reqs if each.finished()]

    def broadcast_began(self, running: Any, number: int) -> None:
        """Begins the broadcast of new requests before step ``number``.

        All running requests wait for it.
        """
        self._guarded(
            lambda: self._attribution.began(
                Step(next_step(number - 1), [], _clients(running), [], kind="requests"), BROADCAST
            )
        )

    def broadcast_ended(self) -> None:
        self._guarded(lambda: self._attribution.ended(sampled=True, key=BROADCAST))

    def _guarded(self, note: Callable[[], None]) -> None:
        if self._lost or not process.has_engines():
            return
        try:
            note()
        except R2cclError:
            raise
        except OSError as error:  # the journal's folder is full, or gone
            self._lost = True
            _LOG.warning("per-request impact is disabled: %s", error)
        except Exception:  # noqa: BLE001  no request fails because of an observer
            self._lost = True
            _LOG.exception("per-request impact is disabled after an error")


def _clients(batch: Any) -> list[str]:
    """Returns the ids of a batch's requests; SGLang's id is the client's."""
    return [each.rid for each in batch.reqs if not each.rid.startswith(HEALTH_CHECK)]


def step_of(number: int, batch: Any, finished: list[str]) -> Step:
    """Converts SGLang's ScheduleBatch into step ``number``, without health checks."""
    if not batch.forward_mode.is_extend():
        running = _clients(batch)
        one_each = batch.forward_mode.is_decode()
        tokens = len(batch.reqs) if one_each else 0  # speculation: unknown
        return Step(number, [], running, running, finished=finished, tokens=tokens)
    prefill: list[str] = []
    decode: list[str] = []
    yielding: list[str] = []
    new: list[NewRequest] = []
    for request, prefix, extend in zip(
        batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True
    ):
        identity = request.rid
        if identity.startswith(HEALTH_CHECK):
            continue
        prompt, generated = len(request.origin_input_ids), len(request.output_ids)
        # A mixed batch has requests in decoding; their last token may not be processed yet. A
        # request that was retracted comes back with its tokens.
        if generated or prefix >= prompt:
            decode.append(identity)
        else:
            prefill.append(identity)
            new.append(NewRequest(identity, identity, prompt))
        if prefix + extend >= prompt + generated:  # else a chunk of a prompt, without a token
            yielding.append(identity)
    return Step(number, prefill, decode, yielding, new, finished, sum(batch.extend_lens))


def named(batch: Any) -> str:
    """Returns a text with the ids of the first requests."""
    names = ", ".join(request_name(each.rid) for each in islice(batch.reqs, _NAMED_REQUESTS))
    more = len(batch.reqs) - _NAMED_REQUESTS
    return f"requests {names}" + (f" and {more} more" if more > 0 else "") if names else ""
