"""A process group of torch.distributed on a :class:`r2serve.Communicator`.

torch's names and argument lists are translated here, and nothing else is done.  The collectives of
a group come one after another, on its lane; each direction of point-to-point traffic between two
ranks, and each tag, has a communicator and a lane of its own, so none waits for another.
Collectives of tensors that are on a GPU go into its stream (:mod:`r2serve.engines.torch.stream`).

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

from r2serve.collectives import Collectives
from r2serve.communicator import Communicator
from r2serve.device import check_all
from r2serve.engines.torch.arguments import single
from r2serve.engines.torch.landing import GPUS, Landing, Landings, check, home_of, source
from r2serve.engines.torch.lane import Lane, R2cclWork
from r2serve.engines.torch.operations import Operations, Tensors
from r2serve.engines.torch.stream import Streams, StreamWork
from r2serve.engines.torch.stream_point import Handover, refuse_capture
from r2serve.errors import PeerClosedError, R2cclError
from r2serve.process import before_exit

LINGER_S = 5.0
"""How long a group that is shut down may go on with what it was asked for before."""


class _Served(NamedTuple):
    """A communicator, and the lane that everything asked of it is on."""

    comm: Communicator
    lane: Lane


class R2cclGroup(Operations):
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
        comm = Communicator.from_store(
            store, rank, size, name=name, management_address=_management_address
        )
        self._group = _Served(comm, Lane(name))
        self._pairs: dict[str, _Served] = {}
        self._lock = threading.Lock()  # of the pairs
        self._streams = Streams()
        self._open = [self._group]
        self._leave = weakref.finalize(self, _leave, self._open, self._streams, os.getpid())
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

    def barrier(self, opts: Any = None) -> R2cclWork:
        """Of the ranks' threads; what is in the current streams of GPUs has been done."""
        self._check_open()
        settled = self._streams.settled()

        def call(comm: Communicator) -> None:
            settled()
            comm.barrier()

        return self._on_lane(self._group, "barrier", call, [], [], [], opts)

    # --- point to point ---------------------------------------------------------------------------

    def send(self, given: Tensors, dst: int, tag: int = 0) -> R2cclWork:
        tensor, served = single(given), self._pair(self._rank, dst, tag)
        check([tensor])
        peer = int(dst > self._rank)

        def call(comm: Communicator) -> None:
            flat = source(tensor, comm.device)
            if tensor.device.type in GPUS:
                _check_what_is_sent(comm)
            comm.send(flat, peer)

        return self._on_lane(
            served,
            f"send to rank {dst}",
            call,
            [],
            given,
            given,
        )

    def recv(self, given: Tensors, src: int, tag: int = 0) -> R2cclWork:
        served = self._pair(src, self._rank, tag)
        landing = Landing(single(given), served.comm.device)
        peer = int(src > self._rank)
        return self._on_lane(
            served,
            f"receive from rank {src}",
            lambda comm: comm.recv(landing.memory, peer),
            [landing],
            given,
            given,
        )

    def recv_anysource(self, given: Tensors, tag: int = 0) -> R2cclWork:
        raise NotImplementedError("r2ccl receives from a rank that is named: recv(…, src=…)")

    def _pair(self, src: int, dst: int, tag: int) -> _Served:
        name = f"{self._label}:{src}>{dst}" + (f":{tag}" if tag else "")
        with self._lock:
            self._check_open()
            if name not in self._pairs:
                peer = dst if src == self._rank else src
                made = _Served(self._group.comm.pair(peer, name), Lane(name))
                self._pairs[name] = made
                self._open.append(made)
            return self._pairs[name]

    def _check_open(self) -> None:
        if not self._leave.alive:
            raise PeerClosedError("the process group has been shut down")

    # --- life -------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End, after what was asked for before; what takes too long ends in an error.

        Raises:
            R2cclError: results of collectives of a GPU are void, and nobody has been told yet.
        """
        until_s = time.monotonic() + LINGER_S
        for served in list(self._open):
            served.lane.drain(max(0.0, until_s - time.monotonic()))
        self._streams.drain(max(0.0, until_s - time.monotonic()))
        failure = self._streams.failure()
        self._leave()
        if failure is not None:
            raise failure

    def abort(self) -> None:
        """End now, on all ranks; what is under way ends in an error."""
        why = "the process group was aborted"
        self._streams.abort(why)
        for served in list(self._open):
            served.comm.abort(why)
        self._leave()

    # --- how it is done ---------------------------------------------------------------------------

    def _ask(
        self,
        what: str,
        call: Callable[[Collectives], Any],
        into: Sequence[Landing | Landings],
        results: Tensors,
        touched: Tensors,
        opts: Any,
    ) -> R2cclWork | StreamWork:
        """touched: all tensors of the collective; first one that says where it is carried out."""
        home = home_of(touched)
        if home.type not in GPUS:
            return self._on_lane(self._group, what, call, into, results, touched, opts)
        self._check_open()
        self._streams.comm_on(
            home, lambda: self._group.comm.twin(f"{self._label}:gpu"), self._timeout_s
        )

        def put(comm: Collectives) -> None:
            call(comm)
            for landing in into:
                landing.deliver()

        beside = bool(getattr(opts, "asyncOp", False))
        return self._streams.add(what, put, touched, results, self._limit_s(opts), beside=beside)

    def _on_lane(
        self,
        served: _Served,
        what: str,
        call: Callable[[Communicator], Any],
        into: Sequence[Landing | Landings],
        results: Tensors,
        touched: Tensors,
        opts: Any = None,
    ) -> R2cclWork:
        refuse_capture(touched)
        inference = torch.is_inference_mode_enabled()  # of the caller's thread, not of the lane's
        handover = Handover(touched)

        def run() -> None:
            with torch.inference_mode(inference), handover.taken():
                call(served.comm)
                for landing in into:
                    landing.deliver()

        # Where torch does not say, somebody may want to do something else meanwhile.
        wait = opts is not None and not getattr(opts, "asyncOp", True)
        work = R2cclWork(what, run, results, self._limit_s(opts), served.comm.abort)
        return served.lane.add(work, wait=wait)

    def _limit_s(self, opts: Any) -> float:
        given_s: float = opts.timeout.total_seconds() if opts is not None else 0.0
        return given_s if given_s > 0 else self._timeout_s


def _leave(open_ones: list[_Served], streams: Streams, process: int) -> None:
    if process != os.getpid():
        return  # of the parent that forked us
    why = PeerClosedError("the process group has been shut down")
    try:
        streams.close()
    finally:
        for comm, lane in list(open_ones):
            if not lane.drain(0):
                comm.abort("the process group is shut down")
            lane.close(why)
        for comm, _ in list(open_ones):
            comm.close()


_management_address: str | None = None


def use_management_address(address: str | None) -> None:
    """Tell groups that are made later this node's address on the management NIC.

    torch.distributed hands a backend no such argument.  None: as ``Communicator.from_store``
    has it by default.
    """
    global _management_address
    _management_address = address


_GROUPS: weakref.WeakSet[R2cclGroup] = weakref.WeakSet()


@before_exit
def _leave_all() -> None:
    """What nobody shut down still tells the others, before its links are closed."""
    groups = list(_GROUPS)
    for group in groups:  # a GPU that waits for one of them keeps the others from ending
        if not group._streams.idle():
            group._streams.abort("the process ends")
    for group in groups:
        group._leave()


def _check_what_is_sent(comm: Communicator) -> None:
    """A GPU that has lost a peer goes on with results that never came; nobody else is to."""
    try:
        check_all()
    except R2cclError as error:
        comm.abort(str(error))
        raise
