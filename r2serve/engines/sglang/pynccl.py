"""A replacement of SGLang's class ``PyNcclCommunicator``, in processes with the choice r2ccl.

A group inside a node gets SGLang's own NCCL communicator; a group of GPUs on several nodes gets a
:class:`SpanningCommunicator`.
"""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.distributed as dist
from sglang.srt.distributed.device_communicators.pynccl import PyNcclCommunicator

from r2serve.device import DeviceCommunicator
from r2serve.engines import flag
from r2serve.engines.sglang.groups import carries
from r2serve.engines.sglang.management_address import management_address
from r2serve.engines.sglang.spanning import SpanningPyNccl


class R2cclPyNccl(PyNcclCommunicator):  # type: ignore[misc]
    """SGLang's own communicator; makes a :class:`SpanningCommunicator` across nodes."""

    def __new__(cls, group: Any, device: Any, *args: Any, **kwargs: Any) -> Self:
        chosen: type[Any] = SpanningCommunicator if spans(group, device) else cls
        made: Self = super().__new__(chosen)
        return made


class SpanningCommunicator(SpanningPyNccl, R2cclPyNccl):
    """Collectives of a group with ranks on several nodes."""

    def __init__(self, group: Any, device: Any, *args: Any, **kwargs: Any) -> None:
        # SGLang's __init__ is skipped, because it would make an NCCL communicator.
        self.group, self.device = group, _device(device)
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.r2ccl = DeviceCommunicator.from_group(
            group,
            name=f"{group.communicator.name}/pynccl",
            device=self.device,
            config=flag.group_config(),
            management_address=management_address(),
        )


def spans(group: Any, device: Any) -> bool:
    """Whether r2ccl carries a group of GPUs."""
    return _device(device).type == "cuda" and carries(group)


def _device(given: Any) -> torch.device:
    return torch.device("cuda", given) if isinstance(given, int) else torch.device(given)
