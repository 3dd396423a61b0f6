"""Methods for the collectives: they check tensors and pass pointers and sizes to the core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from r2serve import sites, tensors
from r2serve.errors import InvalidArgumentError
from r2serve.tensors import ALGORITHMS, DTYPES, OPS

if TYPE_CHECKING:
    from r2serve._core import Communicator as Core
    from r2serve.tensors import Array


class Collectives:
    """Base of :class:`r2serve.Communicator` and :class:`r2serve.DeviceCommunicator`."""

    rank: int
    world_size: int
    device: torch.device = tensors.CPU
    """Device of all tensors."""
    _on_cpu: bool = True
    _sites: bool = False
    """Whether ranks compare the call sites."""
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
        name: str | None = None,
    ) -> Array:
        """Reduces the tensors of all ranks element by element.

        Args:
            tensor: any shape; the same shape and dtype on all ranks.
            op: ``sum``, ``prod``, ``min``, ``max`` or ``avg`` (integers: truncated).
            out: shape and dtype of ``tensor``; may be ``tensor`` itself. Default: a new tensor.
            algorithm: ``one_shot``, ``two_shot`` or ``two_shot_overlap`` forces an algorithm;
                results have the same bits.
            name: the same on all ranks; with ``R2CCL_CONSENSUS=site`` compared in place of the
                calling line. The other calls that all ranks make together take a name as well.

        Returns:
            ``out``.

        Raises:
            InvalidArgumentError: wrong argument; nothing was sent.
            OrderMismatchError, PeerLostError, PeerClosedError, AbortedError: sticky, so every
                later call raises the same error.
        """
        given = tensor
        if type(tensor) is not Tensor:
            tensor = tensors.as_tensor(tensor)
        # An access to a tensor attribute costs as much time as 4 KiB of memory traffic. So a CPU
        # tensor is checked by `is_cpu`, and a call in place reads data_ptr() only once.
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
        if self._sites:
            sites.mark(name)
        source = tensor.data_ptr()
        destination = source if target is tensor else target.data_ptr()
        self._all_reduce(source, destination, tensor.numel(), code, op_code, algorithm_code)
        return tensors.like(given, target, None) if out is None else out

    def all_gather(
        self, tensor: Array, *, out: Array | None = None, name: str | None = None
    ) -> Array:
        """Gathers tensors of equal shape: ``out[r]`` is rank r's; ``(world, *tensor.shape)``."""
        source, code = tensors.checked("tensor", tensor, self.device)
        shape = (self.world_size, *source.shape)
        target = tensors.target(out, shape, source, -self.rank * source.nbytes)
        if self._sites:
            sites.mark(name)
        self._core.all_gatherv(
            source.data_ptr(), target.data_ptr(), [source.numel()] * self.world_size, code
        )
        return tensors.like(tensor, target, out)

    def all_gatherv(
        self,
        tensor: Array,
        sizes: Sequence[int],
        *,
        out: Array | None = None,
        name: str | None = None,
    ) -> Array:
        """Concatenates ``sizes[r]`` rows of each rank r, in rank order, along dimension 0.

        All ranks pass the same ``sizes``. Shape of the result: ``(sum(sizes), *tensor.shape[1:])``.
        """
        source, code = tensors.checked("tensor", tensor, self.device)
        row = tensors.row_elements(source, sizes, self.world_size, sizes[self.rank : self.rank + 1])
        at = -sum(sizes[: self.rank]) * row * source.element_size()
        target = tensors.target(out, (sum(sizes), *source.shape[1:]), source, at)
        if self._sites:
            sites.mark(name)
        self._core.all_gatherv(
            source.data_ptr(), target.data_ptr(), [size * row for size in sizes], code
        )
        return tensors.like(tensor, target, out)

    def reduce_scatter(
        self,
        tensor: Array,
        op: str = "sum",
        *,
        out: Array | None = None,
        name: str | None = None,
    ) -> Array:
        """Reduces like :meth:`all_reduce`; returns this rank's even shard of dimension 0.

        Raises:
            InvalidArgumentError: dimension 0 is not divisible by the world size.
        """
        source, _ = tensors.checked("tensor", tensor, self.device)
        return self.reduce_scatterv(tensor, self._even_rows(source), op, out=out, name=name)

    def reduce_scatterv(
        self,
        tensor: Array,
        sizes: Sequence[int],
        op: str = "sum",
        *,
        out: Array | None = None,
        name: str | None = None,
    ) -> Array:
        """Reduces like :meth:`all_reduce`; rank r receives ``sizes[r]`` rows of the result.

        All ranks pass the same ``sizes``, whose sum is dimension 0 of ``tensor``.
        """
        source, code = tensors.checked("tensor", tensor, self.device)
        row = tensors.row_elements(source, sizes, self.world_size, sizes)
        at = sum(sizes[: self.rank]) * row * source.element_size()
        target = tensors.target(out, (sizes[self.rank], *source.shape[1:]), source, at)
        if op not in tensors.OPS:
            raise tensors.unknown_name(op, None)
        counts = [size * row for size in sizes]
        if self._sites:
            sites.mark(name)
        self._core.reduce_scatterv(
            source.data_ptr(), target.data_ptr(), counts, code, tensors.OPS[op]
        )
        return tensors.like(tensor, target, out)

    def broadcast(self, tensor: Array, root: int) -> Array:
        """Overwrites ``tensor`` on all ranks with rank ``root``'s tensor; returns ``tensor``."""
        data, code = tensors.checked("tensor", tensor, self.device)
        self._core.broadcast(data.data_ptr(), data.numel(), code, root)
        return tensor

    def gather(self, tensor: Array, root: int, *, out: Array | None = None) -> Array | None:
        """Gathers equal shapes on ``root``: ``(world, *tensor.shape)``; returns None elsewhere."""
        source, code = tensors.checked("tensor", tensor, self.device)
        counts = [source.numel()] * self.world_size
        if self.rank != root:
            self._core.gather(source.data_ptr(), 0, counts, code, root)
            return None
        at = -root * source.nbytes
        target = tensors.target(out, (self.world_size, *source.shape), source, at)
        self._core.gather(source.data_ptr(), target.data_ptr(), counts, code, root)
        return tensors.like(tensor, target, out)

    def all_to_all(
        self, tensor: Array, *, out: Array | None = None, name: str | None = None
    ) -> Array:
        """Sends the r-th even shard of dimension 0 to rank r; receives in rank order."""
        source, _ = tensors.checked("tensor", tensor, self.device)
        even = self._even_rows(source)
        return self.all_to_allv(tensor, even, even, out=out, name=name)

    def all_to_allv(
        self,
        tensor: Array,
        in_sizes: Sequence[int],
        out_sizes: Sequence[int],
        *,
        out: Array | None = None,
        name: str | None = None,
    ) -> Array:
        """Sends ``in_sizes[r]`` rows to rank r; receives ``out_sizes[r]`` rows in rank order."""
        source, code = tensors.checked("tensor", tensor, self.device)
        row = tensors.row_elements(source, in_sizes, self.world_size, in_sizes)
        tensors.check_sizes("out_sizes", out_sizes, self.world_size)
        target = tensors.target(out, (sum(out_sizes), *source.shape[1:]), source)
        if self._sites:
            sites.mark(name)
        self._core.all_to_allv(
            source.data_ptr(),
            [size * row for size in in_sizes],
            target.data_ptr(),
            [size * row for size in out_sizes],
            code,
        )
        return tensors.like(tensor, target, out)

    def send(self, tensor: Array, dst: int) -> None:
        """Sends to rank ``dst``, which calls :meth:`recv` with the same number of bytes.

        Returns when the caller may overwrite ``tensor``.
        """
        source, code = tensors.checked("tensor", tensor, self.device)
        self._core.send(source.data_ptr(), source.numel(), code, dst)

    def recv(self, tensor: Array, src: int) -> Array:
        """Receives a tensor from rank ``src`` into ``tensor``; returns ``tensor``.

        Raises:
            OrderMismatchError: the sender's tensor has a different number of bytes.
        """
        target, code = tensors.checked("tensor", tensor, self.device)
        self._core.recv(target.data_ptr(), target.numel(), code, src)
        return tensor

    def barrier(self, *, name: str | None = None) -> None:
        """Waits until all ranks have called ``barrier``."""
        if self._sites:
            sites.mark(name)
        self._core.barrier()

    def _even_rows(self, tensor: torch.Tensor) -> list[int]:
        """Returns the rows of each rank's even shard of dimension 0."""
        if tensor.dim() == 0 or tensor.shape[0] % self.world_size:
            raise InvalidArgumentError(
                f"tensor: dimension 0 of shape {tuple(tensor.shape)} is not divisible by the "
                f"world size {self.world_size}"
            )
        return [tensor.shape[0] // self.world_size] * self.world_size
