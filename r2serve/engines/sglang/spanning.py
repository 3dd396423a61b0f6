"""Collectives of GPU tensors in a group that spans nodes: methods of ``PyNcclCommunicator``.

SGLang ends all device collectives of a group in this object, in eager steps and in captured graphs.
Each method enqueues work on the current stream. **SGLang has not yet been run with this class on a
GPU.** This module imports nothing from SGLang.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from r2serve import tensors
from r2serve.errors import InvalidArgumentError

_OPS = {"SUM": "sum", "PRODUCT": "prod", "MIN": "min", "MAX": "max", "AVG": "avg"}


def name_of(op: Any) -> str:
    """Returns r2ccl's name of a ``torch.distributed.ReduceOp``.

    Raises:
        InvalidArgumentError: r2ccl has no such operation.
    """
    for name, ours in _OPS.items():
        if op == getattr(ReduceOp, name):
            return ours
    raise InvalidArgumentError(f"op is {op}: must be one of {', '.join(_OPS)}")


def _memory_of(output: torch.Tensor) -> torch.Tensor:
    """Returns the wire form of an output, in the output's own memory.

    Raises:
        InvalidArgumentError: the output is not contiguous.
    """
    if not output.is_contiguous():
        raise InvalidArgumentError(
            f"output of shape {tuple(output.shape)} and strides {output.stride()}: must be "
            "contiguous"
        )
    return tensors.carried(output)


class SpanningPyNccl:
    """The methods on a ``DeviceCommunicator``, in the attribute ``r2ccl``.

    ``available`` and ``disabled`` never change, because SGLang would otherwise take another path,
    without failover.
    """

    available = True
    disabled = False
    comm = None
    """SGLang reads NCCL's handle only for symmetric memory, which r2serve turns off."""
    r2ccl: Any
    rank: int
    world_size: int

    def all_reduce(self, tensor: torch.Tensor, op: Any = ReduceOp.SUM) -> None:
        """Reduces in place."""
        if tensor.is_contiguous():
            self.r2ccl.all_reduce(tensor, name_of(op), out=tensor)
        else:
            tensor.copy_(self.r2ccl.all_reduce(tensor.contiguous(), name_of(op)))

    def outplace_all_reduce(
        self,
        in_tensor: torch.Tensor,
        out_tensor: torch.Tensor | None = None,
        op: Any = ReduceOp.SUM,
    ) -> torch.Tensor:
        """Returns the reduced tensor; ``in_tensor`` is unchanged."""
        reduced: torch.Tensor = self.r2ccl.all_reduce(
            in_tensor.contiguous(), name_of(op), out=out_tensor
        )
        return reduced

    def all_gather(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        sizes: Sequence[int] | None = None,
    ) -> None:
        """Gathers into ``output_tensor``, in rank order; ``sizes``: rows of each rank."""
        source, target = tensors.carried(input_tensor), _memory_of(output_tensor)
        if sizes is None:
            self.r2ccl.all_gather(source, out=target)
        elif sum(sizes):
            row = target.numel() // sum(sizes)
            counts = [size * row for size in sizes]
            self.r2ccl.all_gatherv(source.view(-1), counts, out=target.view(-1))

    def reduce_scatter(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        op: Any = ReduceOp.SUM,
        sizes: Sequence[int] | None = None,
    ) -> None:
        """Reduces; rank r receives its even part, or ``sizes[r]`` rows."""
        source = input_tensor.contiguous().view(-1)
        if sizes is None:
            counts = [source.numel() // self.world_size] * self.world_size
        else:
            row = source.numel() // max(sum(sizes), 1)
            counts = [size * row for size in sizes]
        out = _memory_of(output_tensor).view(-1)
        self.r2ccl.reduce_scatterv(source, counts, name_of(op), out=out)

    def all_to_all_single(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor) -> None:
        """Sends the i-th even part to rank i; receives in rank order."""
        source, target = tensors.carried(input_tensor), _memory_of(output_tensor)
        self.r2ccl.all_to_all(source.view(-1), out=target.view(-1))

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Copies the tensor of rank ``src`` of the group to all ranks, in place."""
        carried = tensors.carried(tensor)
        self.r2ccl.broadcast(carried, src)
        if carried.data_ptr() != tensor.data_ptr():
            tensor.copy_(carried.view(tensor.dtype).view(tensor.shape))

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Sends to rank ``dst`` of the group."""
        self.r2ccl.send(tensors.carried(tensor), dst)

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        """Receives a tensor of the same size from rank ``src`` of the group, in place."""
        carried = tensors.carried(tensor)
        self.r2ccl.recv(carried, src)
        if carried.data_ptr() != tensor.data_ptr():
            tensor.copy_(carried.view(tensor.dtype).view(tensor.shape))

    def group_start(self) -> None:
        """Does nothing: calls between start and end run in their order."""

    def group_end(self) -> None:
        """Does nothing; see :meth:`group_start`."""

    def register_comm_window_raw(self, ptr: int, size: int) -> None:
        """Refuses symmetric memory, which belongs to NCCL.

        Raises:
            InvalidArgumentError: always.
        """
        raise InvalidArgumentError(
            "register_comm_window_raw: r2ccl has no symmetric memory; --enable-symm-mem must be "
            "left out"
        )

    def deregister_comm_window(self, window: Any) -> None:
        """Does nothing, because no window is ever registered."""

    @contextlib.contextmanager
    def change_state(self, enable: bool | None = None) -> Iterator[None]:
        """Keeps the communicator enabled, whatever ``enable`` is."""
        yield
