"""A process group of torch.distributed on a :class:`r2serve.Communicator`.

This module only translates names and arguments. Collectives of a group run one after another, on
the group's lane. Point-to-point traffic has a separate communicator for each pair of ranks and
direction, and matches tags at the receiver (:mod:`r2serve.engines.torch.point_to_point`).
Collectives of GPU tensors run on a stream (:mod:`r2serve.engines.torch.stream`).

Not supported: receiving from any rank, ``PREMUL_SUM``, sparse tensors, and sums of dtypes unknown
to the core (float8, unsigned integers over 8 bits).
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from r2serve.collectives import Collectives
from r2serve.communicator import Communicator
from r2serve.config import Config
from r2serve.device import check_all
from r2serve.engines.torch.arguments import single
from r2serve.engines.torch.landing import (
    GPUS,
    Landing,
    Landings,
    check,
    home_of,
    is_direct,
    source,
)
from r2serve.engines.torch.lane import Lane, R2cclWork
from r2serve.engines.torch.operations import Operations, Tensors
from r2serve.engines.torch.point_to_point import Inbox, Outbox, Payload, Posted, check_tag
from r2serve.engines.torch.stream import Streams, StreamWork
from r2serve.engines.torch.stream_point import Handover, refuse_capture
from r2serve.errors import PeerClosedError, R2cclError
from r2serve.process import Origin, before_exit

LINGER_S = 5.0
"""Seconds for submitted work to finish during a shutdown, at most."""


_Open = list[tuple[Communicator, Lane | Inbox]]


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
        self._comm = Communicator.from_store(
            store,
            rank,
            size,
            name=name,
            config=_config,
            management_address=_management_address,
        )
        self._lane = Lane(name)
        self._outboxes: dict[int, Outbox] = {}  # by destination
        self._inboxes: dict[int, Inbox] = {}  # by source
        self._lock = threading.Lock()  # guards both
        self._streams = Streams()
        self._open: _Open = [(self._comm, self._lane)]
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
        return self._comm

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

        return self._on_lane("barrier", call, [], [], [], opts)

    # ---- point to point ----

    def send(self, given: Tensors, dst: int, tag: int = 0) -> R2cclWork:
        tensor = single(given)
        check([tensor])
        check_tag(tag)
        outbox = self._outbox(dst)
        on_gpu = tensor.device.type in GPUS

        def convert_and_send() -> None:
            flat = source(tensor, outbox.comm.device)
            if on_gpu:
                _check_what_is_sent(outbox.comm)
            outbox.send(Payload.of(flat), tag)

        if is_direct(tensor, outbox.comm.device) and not on_gpu:
            run: Callable[[], None] = functools.partial(
                outbox.send, Payload.of(tensor.detach()), tag
            )
        else:
            run = _as_here(convert_and_send, given)
        what = f"send of rank {self._rank} to rank {dst}, tag {tag}"
        work = R2cclWork(what, run, given, self._timeout_s, outbox.comm.abort)
        return outbox.lane.add(work, wait=False)

    def recv(self, given: Tensors, src: int, tag: int = 0) -> R2cclWork:
        tensor = single(given)
        check_tag(tag)
        inbox = self._inbox(src)
        landing = Landing(tensor, inbox.comm.device)
        deliver = landing.deliver if landing.direct else _as_here(landing.deliver, given)
        what = f"receive of rank {self._rank} from rank {src}, tag {tag}"
        work = R2cclWork(what, deliver, given, self._timeout_s, inbox.comm.abort)
        on_gpu = tensor.device.type in GPUS
        return inbox.post(Posted(tag, Payload.of(landing.memory), work, on_gpu))

    def recv_anysource(self, given: Tensors, tag: int = 0) -> R2cclWork:
        raise NotImplementedError("src: None; must be a rank: recv(…, src=…)")

    def _outbox(self, dst: int) -> Outbox:
        self._check_open()
        with self._lock:
            if dst not in self._outboxes:
                made = Outbox(self._pair(dst, f"{self._rank}>{dst}"), int(dst > self._rank))
                self._outboxes[dst] = made
                self._open.append((made.comm, made.lane))
            return self._outboxes[dst]

    def _inbox(self, src: int) -> Inbox:
        self._check_open()
        with self._lock:
            if src not in self._inboxes:
                made = Inbox(self._pair(src, f"{src}>{self._rank}"), int(src > self._rank))
                self._inboxes[src] = made
                self._open.append((made.comm, made))
            return self._inboxes[src]

    def _pair(self, peer: int, direction: str) -> Communicator:
        return self._comm.pair(peer, f"{self._label}:{direction}")

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
        for _, lane in list(self._open):
            lane.drain(max(0.0, until_s - time.monotonic()))
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
        for comm, _ in list(self._open):
            comm.abort(why)
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
            return self._on_lane(what, call, into, results, touched, opts)
        self._check_open()
        self._streams.comm_on(home, lambda: self._comm.twin(f"{self._label}:gpu"), self._timeout_s)

        def put(comm: Collectives) -> None:
            call(comm)
            for landing in into:
                landing.deliver()

        beside = bool(getattr(opts, "asyncOp", False))
        return self._streams.add(what, put, touched, results, self._limit_s(opts), beside=beside)

    def _on_lane(
        self,
        what: str,
        call: Callable[[Communicator], Any],
        into: Sequence[Landing | Landings],
        results: Tensors,
        touched: Tensors,
        opts: Any,
    ) -> R2cclWork:
        self._check_open()
        comm = self._comm  # the work must not keep the group alive

        def run() -> None:
            call(comm)
            for landing in into:
                landing.deliver()

        work = R2cclWork(what, _as_here(run, touched), results, self._limit_s(opts), comm.abort)
        # Without opts it is unknown whether the caller waits, so the lane's thread runs the work.
        return self._lane.add(work, wait=opts is not None and not getattr(opts, "asyncOp", True))

    def _limit_s(self, opts: Any) -> float:
        given_s: float = opts.timeout.total_seconds() if opts is not None else 0.0
        return given_s if given_s > 0 else self._timeout_s


def _as_here(run: Callable[[], Any], touched: Tensors) -> Callable[[], None]:
    """Returns ``run`` for another thread: in this inference mode, and after the current streams."""
    refuse_capture(touched)
    inference = torch.is_inference_mode_enabled()
    handover = Handover(touched)

    def run_as_here() -> None:
        with torch.inference_mode(inference), handover.taken():
            run()

    return run_as_here


def _leave(open_ones: _Open, streams: Streams, origin: Origin) -> None:
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
_config: Config | None = None


def use_management_address(address: str | None) -> None:
    """Sets this node's address on the management NIC, for groups made later.

    torch.distributed passes no such argument to a backend. None: the default of
    ``Communicator.from_store``.
    """
    global _management_address
    _management_address = address


def use_config(config: Config | None) -> None:
    """Sets the configuration of groups made later. None: from the environment."""
    global _config
    _config = config


_GROUPS: weakref.WeakSet[R2cclGroup] = weakref.WeakSet()


def open_groups() -> list[R2cclGroup]:
    """Returns the groups of this process, without those of a parent before a fork."""
    return [group for group in _GROUPS if not group._origin.foreign]


@before_exit
def _leave_all() -> None:
    """Closes groups left open at exit, so that their peers are notified before links close."""
    groups = open_groups()
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
