"""The collectives of a process group, with torch's names and arguments.

This module only translates names and arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from r2serve.collectives import Collectives
from r2serve.engines.torch.arguments import (
    check_alike,
    check_mine,
    check_shares,
    single,
    split_sizes,
)
from r2serve.engines.torch.landing import Landing, Landings, check, home_of, joined, source
from r2serve.engines.torch.reduction import Reduction

Tensors = Sequence[torch.Tensor]
_ProcessGroup: Any = dist.ProcessGroup  # torch's type stubs have overloads never called by torch


class Operations(_ProcessGroup):  # type: ignore[misc]
    """Base of :class:`r2serve.engines.torch.group.R2cclGroup`; each operation returns a work."""

    _rank: int
    _size: int

    def _ask(
        self,
        what: str,
        call: Callable[[Collectives], Any],
        into: Sequence[Landing | Landings],
        results: Tensors,
        touched: Tensors,
        opts: Any,
    ) -> Any:
        """Submits a collective.

        Args:
            call: runs the collective on a communicator of the first device in ``touched``.
            into: memory for the results, copied into the tensors after ``call``.
            results: tensors returned by the work's ``result()``.
            touched: all tensors read or written; the first determines the device.
            opts: torch's options; None: defaults.
        """
        raise NotImplementedError

    def allreduce(self, given: Tensors, opts: Any = None) -> Any:
        return self._reduce_all("all_reduce", [single(given)], opts)

    def allreduce_coalesced(self, given: Tensors, opts: Any = None) -> Any:
        return self._reduce_all("all_reduce of several", given, opts)

    def _reduce_all(self, what: str, given: Tensors, opts: Any) -> Any:
        reduction = _reduction(opts)
        home = home_of(given)
        into = [Landing(reduction.view(tensor), home) for tensor in given]

        def call(comm: Collectives) -> None:
            for landing in into:
                landing.fill()
                reduction.everywhere(comm, landing.memory, landing.memory)

        return self._ask(what, call, into, given, given, opts)

    def reduce(self, given: Tensors, opts: Any) -> Any:
        root, reduction = opts.rootRank, _reduction(opts)
        view = reduction.view(single(given))
        check([view])
        sizes = [view.numel() if rank == root else 0 for rank in range(self._size)]
        into = [Landing(view, home_of([view]))] if self._rank == root else []

        def call(comm: Collectives) -> None:
            flat = source(view, comm.device)
            out = into[0].memory if into else flat.new_empty(0)
            reduction.shared(comm, flat, sizes, out)

        return self._ask("reduce", call, into, given, given, opts)

    def broadcast(self, given: Tensors, opts: Any) -> Any:
        tensor, root = single(given), opts.rootRank
        landing = Landing(tensor, home_of([tensor]))

        def call(comm: Collectives) -> None:
            landing.fill()
            comm.broadcast(landing.memory, root)

        return self._ask("broadcast", call, [landing], given, given, opts)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        return self._gather_all("all_gather", [single(outputs)], inputs, opts)

    def allgather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> Any:
        by_input = list(zip(*outputs, strict=True))
        return self._gather_all("all_gather of several", by_input, inputs, opts)

    def _gather_all(self, what: str, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Any:
        """Submits all-gathers; ``outputs[i]`` has the tensors of all ranks for ``inputs[i]``."""
        for of_ranks, given in zip(outputs, inputs, strict=True):
            check_mine(self._size, self._rank, "outputs", of_ranks, given)
        results = [tensor for of_ranks in outputs for tensor in of_ranks]
        touched = [*inputs, *results]
        home = home_of(touched)
        into = [Landings(of_ranks, home) for of_ranks in outputs]

        def call(comm: Collectives) -> None:
            for given, landings in zip(inputs, into, strict=True):
                comm.all_gatherv(source(given, home), landings.sizes, out=landings.memory)

        return self._ask(what, call, into, results, touched, opts)

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [given], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        for output, given in zip(outputs, inputs, strict=True):
            check_shares(self._size, "output", output, "input", given)
        touched = [*inputs, *outputs]
        home = home_of(touched)
        into = [Landing(output, home) for output in outputs]

        def call(comm: Collectives) -> None:
            for given, landing in zip(inputs, into, strict=True):
                comm.all_gather(source(given, home), out=landing.memory)

        return self._ask("all_gather", call, into, outputs, touched, opts)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Any:
        reduction = _reduction(opts)
        views = [reduction.view(tensor) for tensor in single(inputs)]
        output = reduction.view(single(outputs))
        check_mine(self._size, self._rank, "inputs", views, output)
        touched = [output, *views]
        landing, sizes = Landing(output, home_of(touched)), [view.numel() for view in views]

        def call(comm: Collectives) -> None:
            reduction.shared(comm, joined(views, landing.memory), sizes, landing.memory)

        return self._ask("reduce_scatter", call, [landing], outputs, touched, opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> Any:
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        reduction = _reduction(opts)
        touched = [*outputs, *inputs]
        home = home_of(touched)
        into = [Landing(reduction.view(output), home) for output in outputs]
        views = [reduction.view(given) for given in inputs]
        for output, given in zip(outputs, inputs, strict=True):
            check_shares(self._size, "input", given, "output", output)

        def call(comm: Collectives) -> None:
            for view, landing in zip(views, into, strict=True):
                sizes = [landing.memory.numel()] * comm.world_size
                reduction.shared(comm, source(view, home), sizes, landing.memory)

        return self._ask("reduce_scatter", call, into, outputs, touched, opts)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Any:
        root, given = opts.rootRank, single(inputs)
        check([given])
        results = single(outputs) if self._rank == root else []
        check_alike(self._size, "outputs", results, given)
        touched = [given, *results]
        home = home_of(touched)
        into = [Landings(results, home)] if self._rank == root else []
        out = into[0].memory if into else None
        return self._ask(
            "gather",
            lambda comm: comm.gather(source(given, home), root, out=out),
            into,
            results,
            touched,
            opts,
        )

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Any:
        root, output = opts.rootRank, single(outputs)
        given = single(inputs) if self._rank == root else []
        check_alike(self._size, "inputs", given, output)
        touched = [output, *given]
        landing = Landing(output, home_of(touched))
        count = landing.memory.numel()
        sent = [count if self._rank == root else 0] * self._size
        received = [count if rank == root else 0 for rank in range(self._size)]

        def call(comm: Collectives) -> None:
            flat = joined(given, landing.memory)
            comm.all_to_allv(flat, sent, received, out=landing.memory)

        return self._ask("scatter", call, [landing], outputs, touched, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        check([*outputs, *inputs])
        touched = [*inputs, *outputs]
        into = Landings(outputs, home_of(touched))
        unit = into.memory.element_size()
        sizes = [tensor.numel() * tensor.element_size() // unit for tensor in inputs]
        return self._ask(
            "all_to_all",
            lambda comm: comm.all_to_allv(
                joined(inputs, into.memory), sizes, into.sizes, out=into.memory
            ),
            [into],
            outputs,
            touched,
            opts,
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Any:
        check([output, given])
        touched = [given, output]
        home = home_of(touched)
        landing = Landing(output, home)
        unit = landing.memory.element_size()
        sent = split_sizes(self._size, "input_split_sizes", given, unit, input_splits)
        received = split_sizes(self._size, "output_split_sizes", output, unit, output_splits)
        even = not input_splits and not output_splits  # then the shards of all ranks are even

        def call(comm: Collectives) -> None:
            if even:
                comm.all_to_all(source(given, home), out=landing.memory)
            else:
                comm.all_to_allv(source(given, home), sent, received, out=landing.memory)

        return self._ask("all_to_all", call, [landing], [output], touched, opts)

    # Names used by torch before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _reduction(opts: Any) -> Reduction:
    return Reduction(dist.ReduceOp.SUM if opts is None else opts.reduceOp)
