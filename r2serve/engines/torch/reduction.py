"""Reduction operators of torch on a communicator."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from r2serve import tensors
from r2serve.collectives import Collectives
from r2serve.errors import InvalidArgumentError

_NAMES = {
    ReduceOp.SUM: "sum",
    ReduceOp.PRODUCT: "prod",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.AVG: "avg",
}
# Rare operators: every rank gathers all inputs and reduces them locally.
_BITWISE = {
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


class Reduction:
    """A reduction operator of torch.

    Raises:
        InvalidArgumentError: r2ccl does not support the operator (``PREMUL_SUM``).
    """

    def __init__(self, op: Any) -> None:
        """``op`` is a ``ReduceOp``, or a member of ``ReduceOp``."""
        op = getattr(op, "op", op)
        self._name = _NAMES.get(op)
        self._fold = _BITWISE.get(op)
        if self._name is None and self._fold is None:
            known = ", ".join(each.name for each in (*_NAMES, *_BITWISE))
            raise InvalidArgumentError(f"op: {op} is none of {known}")

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns ``tensor`` in a reducible dtype: complex numbers as pairs of real numbers.

        Raises:
            InvalidArgumentError: r2ccl cannot reduce the dtype by this operator.
        """
        if tensor.is_conj():
            raise InvalidArgumentError("tensor: is a conjugate view; call .resolve_conj() first")
        if tensor.is_complex() and self._name in ("sum", "avg"):
            return torch.view_as_real(tensor)
        if self._fold is not None and tensor.is_floating_point():
            raise InvalidArgumentError(
                f"op: bitwise operators need integers or bool; tensor has {tensor.dtype}"
            )
        if tensor.dtype not in tensors.DTYPES:
            raise tensors.unusable("tensor", tensor, tensor.device)
        return tensor

    def everywhere(self, comm: Collectives, flat: torch.Tensor, out: torch.Tensor) -> None:
        """Reduces ``flat`` of all ranks into ``out`` on every rank; ``out`` may be ``flat``."""
        if self._name is not None:
            comm.all_reduce(flat, self._name, out=out)
        else:
            out.copy_(self._folded(comm, flat))

    def shared(
        self, comm: Collectives, flat: torch.Tensor, sizes: Sequence[int], out: torch.Tensor
    ) -> None:
        """Reduces ``flat`` of all ranks; ``out`` of rank r gets the r-th ``sizes[r]`` elements."""
        if self._name is not None:
            comm.reduce_scatterv(flat, sizes, self._name, out=out)
        else:
            begin = sum(sizes[: comm.rank])
            out.copy_(self._folded(comm, flat)[begin : begin + sizes[comm.rank]])

    def _folded(self, comm: Collectives, flat: torch.Tensor) -> torch.Tensor:
        assert self._fold is not None
        whole: torch.Tensor = functools.reduce(self._fold, comm.all_gather(flat))
        return whole
