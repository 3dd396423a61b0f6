"""Conversion of tensors of any device, layout and dtype into r2ccl's form: flat and contiguous.

"Home" is the device of a communicator's tensors. A collective reads and copies its input when it
runs, not when it is submitted, because an earlier collective may still write the input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from r2serve import tensors
from r2serve.errors import InvalidArgumentError


def check(given: Sequence[torch.Tensor]) -> None:
    """Checks that a collective can carry the tensors together.

    Raises:
        InvalidArgumentError: a tensor is sparse, or dtypes differ.
    """
    for tensor in given:
        if tensor.layout is not torch.strided:
            raise InvalidArgumentError(f"tensor: layout is {tensor.layout}; must be torch.strided")
    if len({tensor.dtype for tensor in given}) > 1:
        names = ", ".join(sorted({str(tensor.dtype) for tensor in given}))
        raise InvalidArgumentError(f"tensors: dtypes differ ({names}); must be a single dtype")


GPUS = {"cuda"}
"""Device types with a :class:`r2serve.DeviceCommunicator`."""


def home_of(touched: Sequence[torch.Tensor]) -> torch.device:
    """Returns the device of a collective: the first tensor's GPU, else the CPU.

    All ranks must choose the same kind of device, so ``touched`` begins with a tensor of an
    argument that every rank passes.
    """
    own = touched[0].device if touched else tensors.CPU
    return own if own.type in GPUS else tensors.CPU


def is_direct(tensor: torch.Tensor, home: torch.device) -> bool:
    """Whether the memory of ``tensor`` is on ``home`` and holds the elements in order."""
    as_it_lies = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    return tensor.device == home and as_it_lies


def source(tensor: torch.Tensor, home: torch.device) -> torch.Tensor:
    """Returns the elements of ``tensor``, flat: the tensor itself if possible, else a copy."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensors.carried(tensor.detach().to(home)).view(-1)


def joined(given: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Joins the elements of all tensors; without tensors returns an empty tensor like ``like``."""
    parts = [source(tensor, like.device) for tensor in given]
    return torch.cat(parts) if parts else like.new_empty(0)


class Landing:
    """Memory for a result: the result's tensor itself, or a buffer, copied into the tensor later.

    ``home``: device of the memory.
    """

    def __init__(self, tensor: torch.Tensor, home: torch.device) -> None:
        check([tensor])
        self._tensor = tensor.detach()
        self.direct = is_direct(tensor, home)
        """The memory is the tensor itself, so :meth:`deliver` does nothing."""
        self._arrived = self._tensor
        if not self.direct:
            self._arrived = torch.empty(tensor.shape, dtype=tensor.dtype, device=home)
        self.memory = tensors.carried(self._arrived).view(-1)
        """Flat memory for the result; :meth:`deliver` copies the memory into the tensor."""

    def fill(self) -> None:
        """Copies the tensor's own elements into the memory."""
        if not self.direct:
            self._arrived.copy_(self._tensor)

    def deliver(self) -> None:
        """Copies the memory into the tensor, unless the memory is the tensor itself."""
        if not self.direct:
            self._tensor.copy_(self._arrived)


class Landings:
    """A single block of memory for the results of several tensors of the same dtype, in order."""

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
