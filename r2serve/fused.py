"""All-reduce fused with the residual addition and RMSNorm after it, on a GPU.

The tensors of all ranks arrive in slots. A kernel of :mod:`r2serve.kernels` reads the slots, and
sums, adds and normalises in registers, so the sum is never written to memory. Requires Triton.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from r2serve import _core, tensors
from r2serve.errors import InvalidArgumentError
from r2serve.kernels.arrival import Arrival
from r2serve.kernels.checks import FLOATS, MAX_PEERS, names
from r2serve.kernels.reduce_add_rms_norm import reduce_add_rms_norm
from r2serve.kernels.rms_norm import MAX_HIDDEN, check_rows


class FusedReduce:
    """Fused collectives of a communicator; see :attr:`r2serve.DeviceCommunicator.fused`."""

    def __init__(
        self,
        core: _core.StreamCommunicator,
        stream: Callable[[], int],
        nodes: Sequence[int],
        device: torch.device,
    ) -> None:
        self._core = core
        self._stream = stream
        self._ranks = len(nodes)
        self._device = device
        # Kernels sum in rank order, which is the canonical order only if every rank is a node.
        self._canonical = len(set(nodes)) == self._ranks <= MAX_PEERS
        self._memory = core.slots()
        self._arrival = Arrival(
            _at(self._memory["sequence"], 4, device).view(torch.int32),
            _at(self._memory["arrived"], 4, tensors.CPU).view(torch.int32),
            _at(self._memory["abort"], 4, tensors.CPU).view(torch.int32),
        )
        ring_bytes = (self._memory["ring"] - 1) * self._memory["entry_bytes"]
        bytes_of_all = ring_bytes + self._memory["most_bytes"] * self._ranks
        self._ring = _at(self._memory["base"], bytes_of_all, device)
        # Slots for larger tensors, if NICs reach the GPU's own memory.
        base = self._memory["direct_base"]
        self._direct_ring = _at(base, bytes_of_all, device) if base else None

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether the fused operation supports this shape and dtype; equal on all ranks."""
        return (
            self._canonical
            and tensor.dtype in FLOATS
            and 0 < tensor.nbytes <= self._memory["most_bytes"]
            and tensor.dim() > 0
            and tensor.shape[-1] <= MAX_HIDDEN
        )

    def add_rms_norm(
        self, tensor: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums the tensors of all ranks, adds ``residual``, and normalises.

        Args:
            tensor: (*rows, hidden), the same shape on all ranks; see :meth:`takes`.
            residual: shape and dtype of ``tensor``.
            weight: (hidden,), float16, bfloat16 or float32.

        Returns:
            The normalised tensor and the new residual, both new tensors, with the accuracy
            documented at :func:`r2serve.kernels.reduce_add_rms_norm.reduce_add_rms_norm`. The sum
            has the bits of :meth:`r2serve.DeviceCommunicator.all_reduce`.

        Raises:
            InvalidArgumentError: a tensor is unsuitable; nothing was sent.
        """
        source, code = tensors.checked("tensor", tensor, self._device)
        if not self.takes(source):
            raise InvalidArgumentError(
                f"tensor: {tuple(source.shape)} of {source.dtype} over {self._ranks} ranks; must "
                f"be {names(FLOATS)}, 1 to {self._memory['most_bytes']} bytes, at most "
                f"{MAX_HIDDEN} columns, on at most {MAX_PEERS} ranks with a node each"
            )
        slots = self._slots_for(source)
        check_rows(slots, residual, weight, self._arrival)
        self._core.gather_slots(self._stream(), source.data_ptr(), source.numel(), code)
        made: tuple[torch.Tensor, torch.Tensor] = reduce_add_rms_norm(
            slots, residual, weight, epsilon, arrival=self._arrival
        )
        return made

    def _slots_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the slots as (ring, ranks, *shape): in each entry the tensors of all ranks."""
        size = tensor.element_size()
        ring = self._ring
        if self._direct_ring is not None and tensor.nbytes >= self._memory["direct_from"]:
            ring = self._direct_ring
        ring = ring[: ring.numel() // size * size].view(tensor.dtype)
        strides = (self._memory["entry_bytes"] // size, tensor.numel(), *tensor.stride())
        return ring.as_strided((self._memory["ring"], self._ranks, *tensor.shape), strides)


def _at(address: int, count: int, device: torch.device) -> torch.Tensor:
    """Wraps foreign memory as a tensor: (count,) of uint8."""
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * count).from_address(address), dtype=torch.uint8)
    return torch.as_tensor(_Exposed(address, count), device=device)


class _Exposed:
    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (count,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
