"""The collectives of a communicator: tensors are checked here, and moved by the core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from r2serve import tensors
from r2serve.errors import InvalidArgumentError
from r2serve.tensors import ALGORITHMS, DTYPES, OPS

if TYPE_CHECKING:
    from r2serve._core import Communicator as Core
    from r2serve.tensors import Array


class Collectives:
    """Base of :class:`r2serve.Communicator`, and of :class:`r2serve.DeviceCommunicator`."""

    rank: int
    world_size: int
    device: torch.device = tensors.CPU
    """Where tensors are."""
    _on_cpu: bool = True
    _core: Core

    def __init__(
        self, core: Core, rank: int, world_size: int, device: torch.device = tensors.CPU
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._on_cpu = device == tensors.CPU
        self._core = core
        self._all_reduce = core.all_reduce

    def all_reduce(
        self,
        tensor: Array,
        op: str = "sum",
        *,
        out: Array | None = None,
        algorithm: str | None = None,
    ) -> Array:
        """Combine the tensors of all ranks element by element.

        Args:
            tensor: any shape; the same shape and dtype on all ranks.
            op: ``sum``, ``prod``, ``min``, ``max`` or ``avg`` (integers: truncated).
            out: like ``tensor``; may be ``tensor`` itself.  Default: a new tensor.
            algorithm: ``one_shot`` or ``two_shot`` forces one; it changes no bit.

        Returns:
            ``out``.

        Raises:
            InvalidArgumentError: before anything was sent.
            OrderMismatchError, PeerLostError, PeerClosedError, AbortedError: sticky.
        """
        given = tensor
        if type(tensor) is not Tensor:
            tensor = tensors.as_tensor(tensor)
        # Every look at a tensor costs as much as 4 KiB of memory: in place one address will do.
        here = tensor.is_cpu if self._on_cpu else tensor.device == self.device
        code = DTYPES.get(tensor.dtype)
        if code is None or not here or not tensor.is_contiguous():
            raise tensors.unusable("tensor", tensor, self.device)
        target = tensor
        if out is None:
            target = torch.empty_like(tensor)
        elif out is not given:
            target = tensors.output(out, tensor.shape, tensor)
        try:
            op_code, algorithm_code = OPS[op], ALGORITHMS[algorithm]
        except KeyError:
            raise tensors.unknown_name(op, algorithm) from None
        source = tensor.data_ptr()
        destination = source if target is tensor else target.data_ptr()
        self._all_reduce(source, destination, tensor.numel(), code, op_code, algorithm_code)
        return tensors.like(given, target, None) if out is None else out

    def all_gather(self, tensor: Array, *, out: Array | None = None) -> Array:
        """Collect the tensors of all ranks: ``out[r]`` is rank r's, shape ``(world, *shape)``."""
        source, code = tensors.checked("tensor", tensor, self.device)
        shape = (self.world_size, *source.shape)
        target = tensors.target(out, shape, source, -self.rank * source.nbytes)
        self._core.all_gatherv(
            source.data_ptr(), target.data_ptr(), [source.numel()] * self.world_size, code
        )
        return tensors.like(tensor, target, out)

    def all_gatherv(
        self, tensor: Array, sizes: Sequence[int], *, out: Array | None = None
    ) -> Array:
        """Collect along dimension 0; rank r brings ``sizes[r]`` rows.  All ranks pass ``sizes``."""
        source, code = tensors.checked("tensor", tensor, self.device)
        row = tensors.row_elements(source, sizes, self.world_size, sizes[self.rank : self.rank + 1])
        at = -sum(sizes[: self.rank]) * row * source.element_size()
        target = tensors.target(out, (sum(sizes), *source.shape[1:]), source, at)
        self._core.all_gatherv(
            source.data_ptr(), target.data_ptr(), [size * row for size in sizes], code
        )
        return tensors.like(tensor, target, out)

    def reduce_scatter(self, tensor: Array, op: str = "sum", *, out: Array | None = None) -> Array:
        """Combine as all_reduce and keep this rank's even share of dimension 0.

        Raises:
            InvalidArgumentError: dimension 0 is not divisible by the world size.
        """
        source, _ = tensors.checked("tensor", tensor, self.device)
        return self.reduce_scatterv(tensor, self._even_rows(source), op, out=out)

    def reduce_scatterv(
        self, tensor: Array, sizes: Sequence[int], op: str = "sum", *, out: Array | None = None
    ) -> Array:
        """As reduce_scatter; rank r keeps ``sizes[r]`` rows.  All ranks pass ``sizes``."""
        source, code = tensors.checked("tensor", tensor, self.device)
        row = tensors.row_elements(source, sizes, self.world_size, sizes)
        at = sum(sizes[: self.rank]) * row * source.element_size()
        target = tensors.target(out, (sizes[self.rank], *source.shape[1:]), source, at)
        if op not in tensors.OPS:
            raise tensors.unknown_name(op, None)
        counts = [size * row for size in sizes]
        self._core.reduce_scatterv(
            source.data_ptr(), target.data_ptr(), counts, code, tensors.OPS[op]
        )
        return tensors.like(tensor, target, out)

    def broadcast(self, tensor: Array, root: int) -> Array:
        """Copy rank ``root``'s tensor to all ranks, in place."""
        data, code = tensors.checked("tensor", tensor, self.device)
        self._core.broadcast(data.data_ptr(), data.numel(), code, root)
        return tensor

    def gather(self, tensor: Array, root: int, *, out: Array | None = None) -> Array | None:
        """Collect the tensors of all ranks on ``root``: ``(world, *shape)``; None elsewhere."""
        source, code = tensors.checked("tensor", tensor, self.device)
        counts = [source.numel()] * self.world_size
        if self.rank != root:
            self._core.gather(source.data_ptr(), 0, counts, code, root)
            return None
        at = -root * source.nbytes
        target = tensors.target(out, (self.world_size, *source.shape), source, at)
        self._core.gather(source.data_ptr(), target.data_ptr(), counts, code, root)
        return tensors.like(tensor, target, out)

    def all_to_all(self, tensor: Array, *, out: Array | None = None) -> Array:
        """Send the r-th even share of dimension 0 to rank r; receive in rank order."""
        source, _ = tensors.checked("tensor", tensor, self.device)
        even = self._even_rows(source)
        return self.all_to_allv(tensor, even, even, out=out)

    def all_to_allv(
        self,
        tensor: Array,
        in_sizes: Sequence[int],
        out_sizes: Sequence[int],
        *,
        out: Array | None = None,
    ) -> Array:
        """Send ``in_sizes[r]`` rows to rank r; receive ``out_sizes[r]`` rows from it, in order."""
        source, code = tensors.checked("tensor", tensor, self.device)
        row = tensors.row_elements(source, in_sizes, self.world_size, in_sizes)
        tensors.check_sizes("out_sizes", out_sizes, self.world_size)
        target = tensors.target(out, (sum(out_sizes), *source.shape[1:]), source)
        self._core.all_to_allv(
            source.data_ptr(),
            [size * row for size in in_sizes],
            target.data_ptr(),
            [size * row for size in out_sizes],
            code,
        )
        return tensors.like(tensor, target, out)

    def send(self, tensor: Array, dst: int) -> None:
        """Send to one rank; returns when ``tensor`` may be changed again."""
        source, code = tensors.checked("tensor", tensor, self.device)
        self._core.send(source.data_ptr(), source.numel(), code, dst)

    def recv(self, tensor: Array, src: int) -> Array:
        """Receive what ``src`` sends, into ``tensor``."""
        target, code = tensors.checked("tensor", tensor, self.device)
        self._core.recv(target.data_ptr(), target.numel(), code, src)
        return tensor

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self._core.barrier()

    def _even_rows(self, tensor: torch.Tensor) -> list[int]:
        """Of each rank's share of dimension 0."""
        if tensor.dim() == 0 or tensor.shape[0] % self.world_size:
            raise InvalidArgumentError(
                f"tensor: dimension 0 of shape {tuple(tensor.shape)} is not divisible by the "
                f"world size {self.world_size}"
            )
        return [tensor.shape[0] // self.world_size] * self.world_size
