"""vLLM's CPU communicator with r2ccl underneath, for groups that span nodes.

vLLM makes a :class:`R2cclCpuCommunicator` for every group of several ranks. A group inside one
node gets exactly this class, which adds nothing to the engine's shared-memory path. A group that
spans nodes gets a :class:`SpanningCpuCommunicator` with r2ccl's collectives.
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
    """vLLM's own communicator; makes a :class:`SpanningCpuCommunicator` across nodes."""


class SpanningCpuCommunicator(SpanningCollectives, R2cclCpuCommunicator):
    """Collectives of a group with ranks on several nodes."""

    def __init__(
        self,
        cpu_group: ProcessGroup,
        device: torch.device | None = None,
        device_group: ProcessGroup | None = None,
        unique_name: str = "",
        use_all2all: bool = False,
        **kwargs: Any,
    ) -> None:
        # CpuCommunicator's __init__ is skipped, because it would set up unused shared memory.
        DeviceCommunicatorBase.__init__(
            self, cpu_group, device, device_group, unique_name, use_all2all=use_all2all, **kwargs
        )
        self.dist_module = torch.distributed
        self.supports_tensor_dict = True
        self.connect(unique_name)


R2cclCpuCommunicator.spanning = SpanningCpuCommunicator
