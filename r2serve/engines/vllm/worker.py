"""vLLM's worker with reports of each step to :mod:`r2serve.observe.attribution`.

The worker withholds tokens that a GPU computed without data of a lost peer. A function makes a
class for each worker class of vLLM; :mod:`r2serve.engines.vllm.classes` lists the classes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from r2serve import process
from r2serve.config import Config
from r2serve.device import check_all, steps_ended, wake_all
from r2serve.engines.vllm import classes, members, orphans
from r2serve.engines.vllm.compared import ComparedSteps
from r2serve.engines.vllm.ending import end_worker_soon
from r2serve.engines.vllm.request_ids import client_name
from r2serve.errors import R2cclError
from r2serve.observe.attribution import Attribution, NewRequest, Step, next_step

_LOG = logging.getLogger(__name__)


def __getattr__(name: str) -> Any:
    """Makes the class on first use, because its base exists only on the matching machine."""
    for base, ours in classes.WORKERS.items():
        module, _, class_name = ours.rpartition(".")
        if module == __name__ and class_name == name:
            base_module, _, base_name = base.rpartition(".")
            return make_worker(getattr(importlib.import_module(base_module), base_name), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def make_worker(base: type[Any], name: str) -> type[Any]:
    """Returns a subclass of vLLM's worker class ``base`` with reports of steps."""

    class R2cclWorker(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._r2serve_steps = FollowedSteps(_about(self.vllm_config))
            drafts = getattr(self.vllm_config, "speculative_config", None) is not None
            self._r2serve_compared = ComparedSteps(drafts=drafts)
            members.watch_once(self.local_rank)
            orphans.watch_once()
            self._r2serve_step = 0

        def execute_model(self, scheduler_output: Any) -> Any:
            self._r2serve_step = next_step(self._r2serve_step)
            self._r2serve_steps.began(self._r2serve_step, scheduler_output)
            wake_all()
            output = None
            try:
                with ending(), aborting(self._r2serve_compared):
                    self._r2serve_compared.began(self._r2serve_step, scheduler_output)
                    output = super().execute_model(scheduler_output)
                    if output is not None:
                        self._r2serve_compared.ended()
                    else:
                        self._r2serve_compared.computed()
            finally:
                self._r2serve_steps.ended(sampled=output is not None)
            return trusted(output)

        def sample_tokens(self, grammar_output: Any) -> Any:
            sampled = False
            try:
                with ending(), aborting(self._r2serve_compared):
                    output = super().sample_tokens(grammar_output)
                    self._r2serve_compared.ended()
                sampled = True
            finally:
                self._r2serve_steps.ended(sampled=sampled)
            return trusted(output)

        def checkpoint_prepare(self) -> None:
            from r2serve.engines.vllm.spanning import refuse_checkpoint

            refuse_checkpoint()
            super().checkpoint_prepare()

    R2cclWorker.__name__ = R2cclWorker.__qualname__ = name
    return R2cclWorker


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Ends the worker after an r2ccl error in the block, also outside vLLM's communicators."""
    try:
        yield
    except R2cclError as error:
        end_worker_soon(error)
        raise


@contextlib.contextmanager
def aborting(compared: ComparedSteps) -> Iterator[None]:
    """Tells the other ranks of an exception in the block; they would wait for this rank."""
    try:
        yield
    except R2cclError:
        raise  # known to the other ranks
    except Exception as error:
        compared.failed(error)
        raise


def trusted(output: Any) -> Any:
    """Returns ``output`` after a check that no peer was lost during its computation.

    GPU kernels end without results after the loss of a peer. So the check follows the copy of the
    tokens from the GPU, and precedes their delivery.

    Raises:
        R2cclError: the reason why results are void; the worker then ends.
    """
    from vllm.v1.outputs import AsyncModelRunnerOutput

    if isinstance(output, AsyncModelRunnerOutput):
        return TrustedOutput(output)
    if output is not None:
        with ending():
            check_all()
    return output


class TrustedOutput:
    """A stand-in for an asynchronous output of vLLM.

    The check for lost peers follows ``get_output``. Every other attribute, and the class seen by
    ``isinstance``, belongs to the output. So a new abstract method of vLLM's interface, as in vLLM
    0.33, needs no change here.
    """

    __slots__ = ("__weakref__", "_r2serve_output", "_r2serve_steps")

    def __init__(self, output: Any) -> None:
        self._r2serve_output = output
        # The next step may be in the stream when this step's output is taken.
        self._r2serve_steps = steps_ended()

    @property  # type: ignore[misc]  # as proxies do
    def __class__(self) -> Any:
        return type(self._r2serve_output)

    def get_output(self) -> Any:
        """Returns the step's output.

        Raises:
            R2cclError: the reason why the output is void; the worker then ends.
        """
        output = self._r2serve_output.get_output()
        with ending():
            check_all(self._r2serve_steps)
        return output

    def __getattr__(self, name: str) -> Any:
        if name in TrustedOutput.__slots__:  # in a copy made without __init__ a slot is empty
            raise AttributeError(name)
        return getattr(self._r2serve_output, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in TrustedOutput.__slots__:
            object.__setattr__(self, name, value)
        else:
            setattr(self._r2serve_output, name, value)


class FollowedSteps:
    """Reports of a worker's steps, in vLLM's terms. An error in a report never fails a step."""

    def __init__(self, about: Mapping[str, str] | None = None) -> None:
        """``about`` contains the labels of the engine's own metrics."""
        self._attribution = Attribution(
            _engines, about or {}, journal_limit_bytes=Config.from_env().journal_limit_bytes
        )
        self._lost = False

    def began(self, number: int, output: Any) -> None:
        """``output`` is vLLM's SchedulerOutput; ``number`` is the number of the step."""
        if process.has_engines():
            self._guarded(
                lambda: self._attribution.began(step_of(number, output, self._attribution))
            )

    def ended(self, *, sampled: bool) -> None:
        self._guarded(lambda: self._attribution.ended(sampled=sampled))

    def _guarded(self, note: Callable[[], None]) -> None:
        if self._lost:
            return
        try:
            note()
        except OSError as error:  # the journal's folder is full, or gone
            self._lost = True
            _LOG.warning("per-request impact is disabled: %s", error)
        except Exception:  # noqa: BLE001  no request fails because of an observer
            self._lost = True
            _LOG.exception("per-request impact is disabled after an error")


def step_of(number: int, output: Any, known: Attribution) -> Step:
    """Converts a SchedulerOutput into step ``number`` with its requests."""
    scheduled: dict[str, int] = output.num_scheduled_tokens
    prefill: list[str] = []
    decode: list[str] = []
    yielding: list[str] = []
    new: list[NewRequest] = []
    for request in output.scheduled_new_reqs:
        identity = request.req_id
        new.append(NewRequest(identity, client_name(identity), request.prompt_len))
        # Model runners of version 2 list a preempted request as new, with its generated tokens.
        (decode if known.has_tokens(identity) else prefill).append(identity)
        so_far = request.prefill_token_ids
        wanted = request.prompt_len if so_far is None else len(so_far)
        if request.num_computed_tokens + scheduled[identity] >= wanted:
            yielding.append(identity)
    cached = output.scheduled_cached_reqs
    for identity, computed, generated in zip(
        cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
    ):
        (decode if generated else prefill).append(identity)
        # A chunk of a prompt yields no token, nor does a recomputation after a preemption.
        if computed + scheduled[identity] >= known.prompt_tokens(identity) + generated:
            yielding.append(identity)
    tokens = sum(scheduled.values())
    return Step(number, prefill, decode, yielding, new, output.finished_req_ids, tokens)


def _about(vllm_config: Any) -> dict[str, str]:
    """Returns the labels of vLLM's own metrics."""
    names = vllm_config.model_config.served_model_name
    return {
        "model_name": names if isinstance(names, str) else names[0],
        "engine": str(vllm_config.parallel_config.data_parallel_index),
    }


def _engines() -> list[Any]:
    return [each.engine for each in process.opened()]
