"""A process group of torch.distributed on a :class:`r2serve.Communicator`.

torch's names and argument lists are translated here, and nothing else is done.  The collectives of
a group come one after another, on its lane; each direction of point-to-point traffic between two
ranks, and each tag, has a communicator and a lane of its own, so none waits for another.

What torch's interface has and this backend has not: receiving from any rank, ``PREMUL_SUM``,
sparse tensors, and sums of types that the core does not know (float8, unsigned over 8 bits).
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from r2serve.communicator import Communicator
from r2serve.engines.torch.arguments import (
    check_alike,
    check_mine,
    check_shares,
    single,
    split_sizes,
)
from r2serve.engines.torch.landing import Landing, Landings, check, joined, source
from r2serve.engines.torch.lane import Lane, R2cclWork
from r2serve.engines.torch.reduction import Reduction
from r2serve.errors import PeerClosedError
from r2serve.process import before_exit

_Tensors = Sequence[torch.Tensor]
_ProcessGroup: Any = dist.ProcessGroup  # its types have forms that torch itself never calls

LINGER_S = 5.0
"""How long a group that is shut down may go on with what it was asked for before."""


class _Served(NamedTuple):
    """A communicator, and the lane that everything asked of it is on."""

    comm: Communicator
    lane: Lane


class R2cclGroup(_ProcessGroup):  # type: ignore[misc]
    """Ranks whose collectives r2ccl carries.  Made by torch, on all ranks of the group alike."""

    # What torch asks of a group's backend; a group in Python is its own.
    supports_splitting = False
    supports_coalescing = False
    supports_shrinking = False

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, name: str) -> None:
        """Connects all ranks.

        Args:
            store: a ``torch.distributed.Store`` of this group alone.
            timeout: of each collective that brings none of its own.
            name: for people; the same on all ranks.

        Raises:
            ConfigError, StartupTimeoutError: as :meth:`r2serve.Communicator.from_store`.
        """
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._timeout_s = timeout.total_seconds()
        self._label = self._name = name
        self._description = ""
        comm = Communicator.from_store(store, rank, size, name=name)
        self._group = _Served(comm, Lane(name))
        self._pairs: dict[str, _Served] = {}
        self._lock = threading.Lock()  # of the pairs
        self._open = [self._group]
        self._leave = weakref.finalize(self, _leave, self._open, os.getpid())
        _GROUPS.add(self)

    @classmethod
    def create(cls, options: Any, _: object) -> R2cclGroup:
        """As ``torch.distributed.Backend.register_backend`` asks for, in its extended form."""
        name = f"torch:{options.group_id}"
        return cls(options.store, options.group_rank, options.group_size, options.timeout, name)

    @property
    def communicator(self) -> Communicator:
        """What carries the collectives: its rails, its events, faults for drills."""
        return self._group.comm

    # What C++ asks, and tells, a group.

    def getBackendName(self) -> str:
        return "r2ccl"

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def _get_backend(self, _: torch.device) -> R2cclGroup:
        return self

    # --- collectives ------------------------------------------------------------------------------

    def allreduce(self, given: _Tensors, opts: Any = None) -> R2cclWork:
        return self._reduce_all("all_reduce", [single(given)], opts)

    def allreduce_coalesced(self, given: _Tensors, opts: Any = None) -> R2cclWork:
        return self._reduce_all("all_reduce of several", given, opts)

    def _reduce_all(self, what: str, given: _Tensors, opts: Any) -> R2cclWork:
        reduction = _reduction(opts)
        into = [Landing(reduction.view(tensor)) for tensor in given]

        def call(comm: Communicator) -> None:
            for landing in into:
                landing.fill()
                reduction.everywhere(comm, landing.memory, landing.memory)

        return self._ask(what, call, into, given, opts)

    def reduce(self, given: _Tensors, opts: Any) -> R2cclWork:
        root, reduction = opts.rootRank, _reduction(opts)
        view = reduction.view(single(given))
        check([view])
        sizes = [view.numel() if rank == root else 0 for rank in range(self._size)]
        into = [Landing(view)] if self._rank == root else []

        def call(comm: Communicator) -> None:
            flat = source(view)
            out = into[0].memory if into else flat.new_empty(0)
            reduction.shared(comm, flat, sizes, out)

        return self._ask("reduce", call, into, given, opts)

    def broadcast(self, given: _Tensors, opts: Any) -> R2cclWork:
        landing, root = Landing(single(given)), opts.rootRank

        def call(comm: Communicator) -> None:
            landing.fill()
            comm.broadcast(landing.memory, root)

        return self._ask("broadcast", call, [landing], given, opts)

    def allgather(
        self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any = None
    ) -> R2cclWork:
        return self._gather_all("all_gather", [single(outputs)], inputs, opts)

    def allgather_coalesced(
        self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any = None
    ) -> R2cclWork:
        by_input = list(zip(*outputs, strict=True))
        return self._gather_all("all_gather of several", by_input, inputs, opts)

    def _gather_all(
        self, what: str, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any
    ) -> R2cclWork:
        """outputs: for each input the tensors of all ranks."""
        for of_ranks, given in zip(outputs, inputs, strict=True):
            check_mine(self._size, self._rank, "outputs", of_ranks, given)
        into = [Landings(of_ranks) for of_ranks in outputs]

        def call(comm: Communicator) -> None:
            for given, landings in zip(inputs, into, strict=True):
                comm.all_gatherv(source(given), landings.sizes, out=landings.memory)

        results = [tensor for of_ranks in outputs for tensor in of_ranks]
        return self._ask(what, call, into, results, opts)

    def all_gather_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> R2cclWork:
        return self.all_gather_single_coalesced([output], [given], opts)

    def all_gather_single_coalesced(
        self, outputs: _Tensors, inputs: _Tensors, opts: Any = None
    ) -> R2cclWork:
        for output, given in zip(outputs, inputs, strict=True):
            check_shares(self._size, "output", output, "input", given)
        into = [Landing(output) for output in outputs]

        def call(comm: Communicator) -> None:
            for given, landing in zip(inputs, into, strict=True):
                comm.all_gather(source(given), out=landing.memory)

        return self._ask("all_gather", call, into, outputs, opts)

    def reduce_scatter(
        self, outputs: _Tensors, inputs: Sequence[_Tensors], opts: Any = None
    ) -> R2cclWork:
        reduction = _reduction(opts)
        views = [reduction.view(tensor) for tensor in single(inputs)]
        output = reduction.view(single(outputs))
        check_mine(self._size, self._rank, "inputs", views, output)
        landing, sizes = Landing(output), [view.numel() for view in views]

        def call(comm: Communicator) -> None:
            reduction.shared(comm, joined(views, landing.memory), sizes, landing.memory)

        return self._ask("reduce_scatter", call, [landing], outputs, opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> R2cclWork:
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: _Tensors, inputs: _Tensors, opts: Any = None
    ) -> R2cclWork:
        reduction = _reduction(opts)
        into = [Landing(reduction.view(output)) for output in outputs]
        views = [reduction.view(given) for given in inputs]
        for output, given in zip(outputs, inputs, strict=True):
            check_shares(self._size, "input", given, "output", output)

        def call(comm: Communicator) -> None:
            for view, landing in zip(views, into, strict=True):
                sizes = [landing.memory.numel()] * comm.world_size
                reduction.shared(comm, source(view), sizes, landing.memory)

        return self._ask("reduce_scatter", call, into, outputs, opts)

    def gather(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any) -> R2cclWork:
        root, given = opts.rootRank, single(inputs)
        check([given])
        results = single(outputs) if self._rank == root else []
        check_alike(self._size, "outputs", results, given)
        into = [Landings(results)] if self._rank == root else []
        out = into[0].memory if into else None
        return self._ask(
            "gather", lambda comm: comm.gather(source(given), root, out=out), into, results, opts
        )

    def scatter(self, outputs: _Tensors, inputs: Sequence[_Tensors], opts: Any) -> R2cclWork:
        root, output = opts.rootRank, single(outputs)
        given = single(inputs) if self._rank == root else []
        check_alike(self._size, "inputs", given, output)
        landing = Landing(output)
        count = landing.memory.numel()
        sent = [count if self._rank == root else 0] * self._size
        received = [count if rank == root else 0 for rank in range(self._size)]

        def call(comm: Communicator) -> None:
            flat = joined(given, landing.memory)
            comm.all_to_allv(flat, sent, received, out=landing.memory)

        return self._ask("scatter", call, [landing], outputs, opts)

    def alltoall(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> R2cclWork:
        check([*outputs, *inputs])
        into = Landings(outputs)
        unit = into.memory.element_size()
        sizes = [tensor.numel() * tensor.element_size() // unit for tensor in inputs]
        return self._ask(
            "all_to_all",
            lambda comm: comm.all_to_allv(
                joined(inputs, into.memory), sizes, into.sizes, out=into.memory
            ),
            [into],
            outputs,
            opts,
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
    ) -> R2cclWork:
        check([output, given])
        landing = Landing(output)
        unit = landing.memory.element_size()
        sent = split_sizes(self._size, "input_split_sizes", given, unit, input_splits)
        received = split_sizes(self._size, "output_split_sizes", output, unit, output_splits)
        return self._ask(
            "all_to_all",
            lambda comm: comm.all_to_allv(source(given), sent, received, out=landing.memory),
            [landing],
            [output],
            opts,
        )

    def barrier(self, opts: Any = None) -> R2cclWork:
        return self._ask("barrier", lambda comm: comm.barrier(), [], [], opts)

    # torch before 2.13 asks by these names.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # --- point to point ---------------------------------------------------------------------------

    def send(self, given: _Tensors, dst: int, tag: int = 0) -> R2cclWork:
        tensor, served = single(given), self._pair(self._rank, dst, tag)
        check([tensor])
        peer = int(dst > self._rank)
        return self._ask_of(
            served, f"send to rank {dst}", lambda comm: comm.send(source(tensor), peer), [], given
        )

    def recv(self, given: _Tensors, src: int, tag: int = 0) -> R2cclWork:
        landing, served = Landing(single(given)), self._pair(src, self._rank, tag)
        peer = int(src > self._rank)
        return self._ask_of(
            served,
            f"receive from rank {src}",
            lambda comm: comm.recv(landing.memory, peer),
            [landing],
            given,
        )

    def recv_anysource(self, given: _Tensors, tag: int = 0) -> R2cclWork:
        raise NotImplementedError("r2ccl receives from a rank that is named: recv(…, src=…)")

    def _pair(self, src: int, dst: int, tag: int) -> _Served:
        name = f"{self._label}:{src}>{dst}" + (f":{tag}" if tag else "")
        with self._lock:
            if not self._leave.alive:
                raise PeerClosedError("the process group has been shut down")
            if name not in self._pairs:
                peer = dst if src == self._rank else src
                made = _Served(self._group.comm.pair(peer, name), Lane(name))
                self._pairs[name] = made
                self._open.append(made)
            return self._pairs[name]

    # --- life -------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End, after what was asked for before; what takes too long ends in an error."""
        until_s = time.monotonic() + LINGER_S
        for served in list(self._open):
            served.lane.drain(max(0.0, until_s - time.monotonic()))
        self._leave()

    def abort(self) -> None:
        """End now, on all ranks; what is under way ends in an error."""
        for served in list(self._open):
            served.comm.abort("the process group was aborted")
        self._leave()

    # --- how it is done ---------------------------------------------------------------------------

    def _ask(
        self,
        what: str,
        call: Callable[[Communicator], Any],
        into: Sequence[Landing | Landings],
        results: _Tensors,
        opts: Any,
    ) -> R2cclWork:
        # Where torch does not say, somebody may want to do something else meanwhile.
        wait = not getattr(opts, "asyncOp", True)
        given_s = opts.timeout.total_seconds() if opts is not None else 0.0
        return self._ask_of(self._group, what, call, into, results, wait, given_s)

    def _ask_of(
        self,
        served: _Served,
        what: str,
        call: Callable[[Communicator], Any],
        into: Sequence[Landing | Landings],
        results: _Tensors,
        wait: bool = False,
        timeout_s: float = 0.0,
    ) -> R2cclWork:
        # What the caller's thread has, and the lane's has not.
        inference = torch.is_inference_mode_enabled()
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        stream = torch.cuda.current_stream() if on_gpu else None
        comm = served.comm

        def run() -> None:
            with torch.inference_mode(inference), torch.cuda.stream(stream):
                call(comm)
                for landing in into:
                    landing.deliver()

        limit_s = timeout_s if timeout_s > 0 else self._timeout_s
        return served.lane.add(R2cclWork(what, run, results, limit_s, comm.abort), wait=wait)


def _leave(open_ones: list[_Served], process: int) -> None:
    if process != os.getpid():
        return  # of the parent that forked us
    why = PeerClosedError("the process group has been shut down")
    for comm, lane in list(open_ones):
        if not lane.drain(0):
            comm.abort("the process group is shut down")
        lane.close(why)
    for comm, _ in list(open_ones):
        comm.close()


_GROUPS: weakref.WeakSet[R2cclGroup] = weakref.WeakSet()


@before_exit
def _leave_all() -> None:
    """What nobody shut down still tells the others, before its links are closed."""
    for group in list(_GROUPS):
        group._leave()


def _reduction(opts: Any) -> Reduction:
    return Reduction(dist.ReduceOp.SUM if opts is None else opts.reduceOp)
