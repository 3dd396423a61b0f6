"""A process group of torch.distributed on a :class:`r2serve.Communicator`.

This module only translates names and arguments. Collectives of a group run one after another, on
the group's lane. Point-to-point traffic has a separate communicator and lane for each pair of
ranks, direction and tag, so no message waits for another tag or direction. Collectives of GPU
tensors run on a stream (:mod:`r2serve.engines.torch.stream`).

Not supported: receiving from any rank, ``PREMUL_SUM``, sparse tensors, and sums of dtypes unknown
to the core (float8, unsigned integers over 8 bits).
"""

from __future__ import annotations

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
from r2serve.process import Origin, before_exit

LINGER_S = 5.0
"""Seconds for submitted work to finish during a shutdown, at most."""


class _Served(NamedTuple):
    """A communicator and the lane of its operations."""

    comm: Communicator
    lane: Lane


class R2cclGroup(Operations):
    """A process group over r2ccl; torch makes the group with the same arguments on all ranks."""

    # Attributes of a backend; torch reads them from the group, as the group is its own backend.
    supports_splitting = False
    supports_coalescing = False
    supports_shrinking = False

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, name: str) -> None:
        """Connects all ranks.

        Args:
            store: a ``torch.distributed.Store`` private to this group.
            timeout: default timeout of collectives.
            name: label for logs; the same on all ranks.

        Raises:
            ConfigError, StartupTimeoutError: see :meth:`r2serve.Communicator.from_store`.
        """
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._timeout_s = timeout.total_seconds()
        self._origin = Origin()
        self._label = self._name = name
        self._description = ""
        comm = Communicator.from_store(
            store, rank, size, name=name, management_address=_management_address
        )
        self._group = _Served(comm, Lane(name))
        self._pairs: dict[str, _Served] = {}
        self._lock = threading.Lock()  # guards _pairs
        self._streams = Streams()
        self._open = [self._group]
        self._leave = weakref.finalize(self, _leave, self._open, self._streams, self._origin)
        _GROUPS.add(self)

    @classmethod
    def create(cls, options: Any, _: object) -> R2cclGroup:
        """Makes a group in the extended form of ``torch.distributed.Backend.register_backend``."""
        name = f"torch:{options.group_id}"
        return cls(options.store, options.group_rank, options.group_size, options.timeout, name)

    @property
    def communicator(self) -> Communicator:
        """The communicator of the collectives, for rails, events and fault injection."""
        return self._group.comm

    # Getters and setters called by torch's C++.

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
        """Waits for all ranks, and for work submitted so far to the GPU's current stream."""
        self._check_open()
        settled = self._streams.settled()

        def call(comm: Communicator) -> None:
            settled()
            comm.barrier()

        return self._on_lane(self._group, "barrier", call, [], [], [], opts)

    # ---- point to point ----

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
        raise NotImplementedError("src: None; must be a rank: recv(…, src=…)")

    def _pair(self, src: int, dst: int, tag: int) -> _Served:
        name = f"{self._label}:{src}>{dst}" + (f":{tag}" if tag else "")
        self._check_open()
        with self._lock:
            if name not in self._pairs:
                peer = dst if src == self._rank else src
                made = _Served(self._group.comm.pair(peer, name), Lane(name))
                self._pairs[name] = made
                self._open.append(made)
            return self._pairs[name]

    def _check_open(self) -> None:
        self._origin.check("process group")
        if not self._leave.alive:
            raise PeerClosedError("the process group has been shut down")

    # ---- lifecycle ----

    def shutdown(self) -> None:
        """Closes after a wait for submitted work; unfinished work ends in an error.

        Raises:
            R2cclError: results of GPU collectives are void, and no call has reported this yet.
        """
        self._origin.check("process group")
        until_s = time.monotonic() + LINGER_S
        for served in list(self._open):
            served.lane.drain(max(0.0, until_s - time.monotonic()))
        self._streams.drain(max(0.0, until_s - time.monotonic()))
        failure = self._streams.failure()
        self._leave()
        if failure is not None:
            raise failure

    def abort(self) -> None:
        """Aborts on all ranks; running collectives end in an error."""
        self._origin.check("process group")
        why = "the process group was aborted"
        self._streams.abort(why)
        for served in list(self._open):
            served.comm.abort(why)
        self._leave()

    # ---- execution ----

    def _ask(
        self,
        what: str,
        call: Callable[[Collectives], Any],
        into: Sequence[Landing | Landings],
        results: Tensors,
        touched: Tensors,
        opts: Any,
    ) -> R2cclWork | StreamWork:
        """``touched`` lists all tensors; the first tensor determines the device."""
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
        self._check_open()
        refuse_capture(touched)
        inference = torch.is_inference_mode_enabled()  # per thread: the lane's thread sets it, too
        handover = Handover(touched)

        def run() -> None:
            with torch.inference_mode(inference), handover.taken():
                call(served.comm)
                for landing in into:
                    landing.deliver()

        # Without opts it is unknown whether the caller waits, so the lane's thread runs the work.
        wait = opts is not None and not getattr(opts, "asyncOp", True)
        work = R2cclWork(what, run, results, self._limit_s(opts), served.comm.abort)
        return served.lane.add(work, wait=wait)

    def _limit_s(self, opts: Any) -> float:
        given_s: float = opts.timeout.total_seconds() if opts is not None else 0.0
        return given_s if given_s > 0 else self._timeout_s


def _leave(open_ones: list[_Served], streams: Streams, origin: Origin) -> None:
    if origin.foreign:
        return  # a fork's child must not close the parent's group
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
    """Sets this node's address on the management NIC, for groups made later.

    torch.distributed passes no such argument to a backend. None: the default of
    ``Communicator.from_store``.
    """
    global _management_address
    _management_address = address


_GROUPS: weakref.WeakSet[R2cclGroup] = weakref.WeakSet()


@before_exit
def _leave_all() -> None:
    """Closes groups left open at exit, so that their peers are notified before links close."""
    groups = [group for group in _GROUPS if not group._origin.foreign]
    for group in groups:  # a GPU that waits in a group would keep other groups from ending
        if not group._streams.idle():
            group._streams.abort("the process ends")
    for group in groups:
        group._leave()


def _check_what_is_sent(comm: Communicator) -> None:
    """Refuses to send results of a GPU after the loss of a peer, because the results are void."""
    try:
        check_all()
    except R2cclError as error:
        comm.abort(str(error))
        raise
