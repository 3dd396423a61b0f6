"""vLLM's CPU communicator with r2ccl underneath, for groups that span nodes.

vLLM builds one :class:`R2cclCpuCommunicator` for every group of more than one rank.  A group
inside one node gets exactly that class, which adds nothing to vLLM's: the engine's shared-memory
path is called without anything in between.  A group that spans nodes gets
:class:`SpanningCpuCommunicator`, whose every collective is r2ccl's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from r2serve.engines.vllm.spanning import ChosenByNodes, SpanningCollectives

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class R2cclCpuCommunicator(ChosenByNodes, CpuCommunicator):  # type: ignore[misc]
    """vLLM's own communicator; makes a :class:`SpanningCpuCommunicator` where nodes differ."""


class SpanningCpuCommunicator(SpanningCollectives, R2cclCpuCommunicator):
    """Collectives of a group whose ranks live on more than one node."""

    def __init__(
        self,
        cpu_group: ProcessGroup,
        device: torch.device | None = None,
        device_group: ProcessGroup | None = None,
        unique_name: str = "",
        use_all2all: bool = False,
        **kwargs: Any,
    ) -> None:
        # Not CpuCommunicator's: it would set up shared memory that nothing here uses.
        DeviceCommunicatorBase.__init__(
            self, cpu_group, device, device_group, unique_name, use_all2all=use_all2all, **kwargs
        )
        self.dist_module = torch.distributed
        self.supports_tensor_dict = True
        self.connect(unique_name)


R2cclCpuCommunicator.spanning = SpanningCpuCommunicator
