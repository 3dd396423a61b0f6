"""Steps of a vLLM worker for the comparison of positions between ranks (``R2CCL_CONSENSUS``).

All ranks of a scheduler run the same steps, so the groups TP, DCP and PP count steps. DP and EP
groups span schedulers, and an idle engine runs dummy batches between its steps: such groups compare
only the numbers of calls, as every group does. Dummy batches, warm-up and profiling belong to no
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from vllm.distributed import parallel_state

from r2serve import Communicator
from r2serve.device import DeviceCommunicator
from r2serve.engines.vllm.request_ids import client_name
from r2serve.observe.names import printable, request_name

_MEETING = ("tp", "dcp")
_PIPELINED = ("pp",)
_NAMED_REQUESTS = 3


def replays_alike(group: str) -> bool:
    """Whether all ranks of the group replay the same captured graphs.

    Ranks of a DP or EP group may replay graphs of other LoRA adapters.
    """
    return group.partition(":")[0] in _MEETING


class ComparedSteps:
    """The steps of a worker, in the groups of its scheduler that r2ccl carries."""

    def __init__(self, *, drafts: bool = False) -> None:
        """``drafts``: sampling may make calls, because a model drafts tokens."""
        self._drafts = drafts
        self._meeting: Sequence[Communicator | DeviceCommunicator] | None = None
        self._pipelined: Sequence[Communicator | DeviceCommunicator] = ()

    def began(self, number: int, output: Any) -> None:
        """Begins step ``number``, the step of a SchedulerOutput.

        Raises:
            R2cclError: the ranks have parted in the step before, or the group has failed.
        """
        if self._meeting is None:
            self._meeting, self._pipelined = _carried(_MEETING), _carried(_PIPELINED)
        if not self._meeting and not self._pipelined:
            return
        about = named(output.num_scheduled_tokens)
        for group in self._meeting:
            group.step(number, about)
        for group in self._pipelined:  # stages are at different steps and must not wait
            group.mark_step(number, about)

    def computed(self) -> None:
        """Sends the positions before the tokens are sampled, if no call follows.

        Then no rank waits for the sampling of another rank.

        Raises:
            R2cclError: see :meth:`ended`.
        """
        if not self._drafts:
            for group in self._meeting or ():
                group.post_position()

    def ended(self) -> None:
        """Compares positions, before the step's tokens leave the worker.

        Groups with tensors on GPUs compare in the order of the stream. Their errors are raised by
        ``r2serve.device.check_all``, before the tokens leave the worker.

        Raises:
            R2cclError: the ranks have parted in this step, or the group has failed.
        """
        for group in self._meeting or ():
            group.end_step()

    def failed(self, error: BaseException) -> None:
        """Ends the groups after an exception in a step, because the other ranks wait for this one.

        vLLM only logs the exception of a rank that returns no output.
        """
        for group in self._meeting or ():
            group.abort(printable(f"{type(error).__name__} in a step: {error}"))


def named(scheduled: dict[str, int]) -> str:
    """Returns a text with the clients' ids of the first requests."""
    first = islice(scheduled, _NAMED_REQUESTS)
    names = ", ".join(request_name(client_name(identity)) for identity in first)
    more = len(scheduled) - _NAMED_REQUESTS
    return f"requests {names}" + (f" and {more} more" if more > 0 else "") if names else ""


def _carried(kinds: Sequence[str]) -> list[Communicator | DeviceCommunicator]:
    found = []
    for name, reference in list(parallel_state._groups.items()):
        group = reference()
        communicator = getattr(getattr(group, "device_communicator", None), "r2ccl", None)
        if name.partition(":")[0] in kinds and isinstance(
            communicator, Communicator | DeviceCommunicator
        ):
            found.append(communicator)
    return found
