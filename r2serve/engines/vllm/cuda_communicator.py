"""vLLM's CUDA communicator with r2ccl underneath, for groups that span nodes.

A group inside one node keeps vLLM's own path, NVLink included, as on the CPU. A group that spans
nodes gets :class:`SpanningCudaCommunicator` with r2ccl's collectives. vLLM sends some data on a
group's ``device_group`` (tensors of pipeline stages); our backend of torch.distributed carries this
data.  **vLLM has not yet been run with this class on a GPU.**
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

from r2serve.config import Config
from r2serve.device import DeviceCommunicator
from r2serve.engines import flag
from r2serve.engines.vllm import combinations, compared, gpus
from r2serve.engines.vllm.classes import OTHER_PATHS, OTHER_PATHS_WANTED
from r2serve.engines.vllm.management_address import management_address
from r2serve.engines.vllm.spanning import (
    ChosenByNodes,
    SpanningCollectives,
    final,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class R2cclCudaCommunicator(ChosenByNodes, CudaCommunicator):  # type: ignore[misc]
    """vLLM's own communicator; makes a :class:`SpanningCudaCommunicator` across nodes."""


class SpanningCudaCommunicator(SpanningCollectives, R2cclCudaCommunicator):
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
        running = get_current_vllm_config_or_none()
        if running is not None:
            combinations.refuse_in_group(unique_name, running)
        # A configuration without known nodes was not checked at start.
        ordinal = 0 if device is None or device.index is None else device.index
        gpus.check_in_worker(Config.from_env().cuda_library, ordinal)
        # CudaCommunicator's __init__ is skipped, because it would make an NCCL communicator.
        kwargs.pop("tcp_store_group", None)
        DeviceCommunicatorBase.__init__(
            self, cpu_group, device, device_group, unique_name, use_all2all=use_all2all, **kwargs
        )
        for path in OTHER_PATHS:
            setattr(self, path, None)
        for wanted in OTHER_PATHS_WANTED:
            setattr(self, wanted, False)
        self.connect(unique_name)

    def open(self, unique_name: str) -> DeviceCommunicator:
        """Makes the communicator of the group."""
        made = DeviceCommunicator.from_group(
            self.cpu_group,
            name=unique_name,
            device=self.device,
            config=flag.group_config(),
            management_address=management_address(),
        )
        if compared.replays_alike(unique_name):
            made.compare_captures()
        return made

    def all_reduce_add_rms_norm(
        self, input_: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the operation of the base class, in a single kernel if a tensor fits the slots."""
        input_ = input_.contiguous()
        if not self.r2ccl.fused.takes(input_):
            return super().all_reduce_add_rms_norm(input_, residual, weight, epsilon)
        return self._fused(input_, residual.contiguous(), weight, epsilon)

    def fuses(self, shape: tuple[int, int], dtype: torch.dtype) -> bool:
        """Whether a single kernel does the all-reduce, the addition and the RMSNorm.

        :meth:`r2serve.fused.FusedReduce.takes` has the limits.
        """
        taken: bool = self.r2ccl.fused.takes(torch.empty(shape, dtype=dtype, device="meta"))
        return taken

    @final
    def _fused(
        self, input_: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        made: tuple[torch.Tensor, torch.Tensor] = self.r2ccl.fused.add_rms_norm(
            input_, residual, weight, epsilon
        )
        return made


R2cclCudaCommunicator.spanning = SpanningCudaCommunicator
