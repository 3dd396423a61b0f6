"""Tensors of any device, layout and type, as what r2ccl carries: flat, contiguous, at home.

Home is where a communicator has its tensors.  A collective's input is read, and copied where it
must be, when the collective is carried out and not when it is asked for: what was asked for before
may still have to write it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from r2serve import tensors
from r2serve.errors import InvalidArgumentError


def check(given: Sequence[torch.Tensor]) -> None:
    """Whether they can be carried together.

    Raises:
        InvalidArgumentError: a tensor is sparse, or they are of different types.
    """
    for tensor in given:
        if tensor.layout is not torch.strided:
            raise InvalidArgumentError(
                f"tensor: layout {tensor.layout}; r2ccl takes strided tensors"
            )
    if len({tensor.dtype for tensor in given}) > 1:
        names = ", ".join(sorted({str(tensor.dtype) for tensor in given}))
        raise InvalidArgumentError(f"tensors: of different types ({names})")


GPUS = {"cuda"}
"""Types of devices that a :class:`r2serve.DeviceCommunicator` is at home on."""


def home_of(touched: Sequence[torch.Tensor]) -> torch.device:
    """Where a collective is carried out: where the first tensor is, if on a GPU, or on the host.

    Ranks have to agree, so the first is one that each of them has.
    """
    own = touched[0].device if touched else tensors.CPU
    return own if own.type in GPUS else tensors.CPU


def source(tensor: torch.Tensor, home: torch.device) -> torch.Tensor:
    """The elements of ``tensor``, flat: itself where it can be read as it lies, else a copy."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensors.carried(tensor.detach().to(home)).view(-1)


def joined(given: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """The elements of all, one behind the other; of none: an empty tensor like ``like``."""
    parts = [source(tensor, like.device) for tensor in given]
    return torch.cat(parts) if parts else like.new_empty(0)


class Landing:
    """Where results for a tensor arrive: the tensor itself, or memory that is copied into it."""

    def __init__(self, tensor: torch.Tensor, home: torch.device) -> None:
        check([tensor])
        self._tensor = tensor.detach()
        as_it_lies = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        self._direct = tensor.device == home and as_it_lies
        self._arrived = self._tensor
        if not self._direct:
            self._arrived = torch.empty(tensor.shape, dtype=tensor.dtype, device=home)
        self.memory = tensors.carried(self._arrived).view(-1)
        """Flat; what lands here is what the tensor gets from :meth:`deliver`."""

    def fill(self) -> None:
        """Put the tensor's own elements in place."""
        if not self._direct:
            self._arrived.copy_(self._tensor)

    def deliver(self) -> None:
        if not self._direct:
            self._tensor.copy_(self._arrived)


class Landings:
    """As one piece of memory, for tensors of one type that arrive one behind the other."""

    def __init__(self, into: Sequence[torch.Tensor], home: torch.device) -> None:
        check(into)
        self._into = [Landing(tensor, home) for tensor in into]
        self.sizes = [landing.memory.numel() for landing in self._into]
        self.memory = self._into[0].memory.new_empty(sum(self.sizes))

    def deliver(self) -> None:
        begin = 0
        for landing, size in zip(self._into, self.sizes, strict=True):
            landing.memory.copy_(self.memory[begin : begin + size])
            landing.deliver()
            begin += size
