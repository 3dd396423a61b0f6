"""Messages with tags between two ranks: a single stream for each direction, matched by tag.

The sender puts a header before each payload: the tag and the number of bytes. The receiver matches
tags like MPI: a message belongs to the oldest receive posted for the tag. A message without a
posted receive is early, and is kept until its receive. The stream is read only while a posted
receive waits. Early messages are therefore messages sent before a message with a waiting receive;
all others stay with the sender.

An envelope is a header with room for a payload. A payload that fits travels in the envelope; any
other payload follows as a separate message. Both ends must know the size of the next envelope, so
the size depends on the payload before. Small payloads of constant size thus travel in envelopes.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from r2serve import tensors
from r2serve.communicator import Communicator
from r2serve.engines.torch.lane import Lane, R2cclWork, watch
from r2serve.errors import InvalidArgumentError, OrderMismatchError
from r2serve.process import made_before_fork

if TYPE_CHECKING:
    import numpy

    Bytes = numpy.ndarray[Any, numpy.dtype[numpy.uint8]]

_LOG = logging.getLogger("r2serve.r2ccl")

MAX_TAG = 2**63 - 1
"""Largest tag of a header."""

HEADER = struct.Struct("=qq")
"""Tag, and size of the payload in bytes."""

MANY_BYTES = 1 << 30
"""Early messages of this size are told in the log, and again each time that the size doubles."""

MIN_ROOM, MAX_ROOM = 112, 32 * 1024
"""Bounds of an envelope's room, bytes. Copies of larger payloads cost more than a message."""


def check_tag(tag: int) -> None:
    """Raises InvalidArgumentError if no header can carry ``tag``."""
    if not 0 <= tag <= MAX_TAG:
        raise InvalidArgumentError(f"tag: {tag}; must be within 0 to {MAX_TAG}")


class _Envelope:
    """Memory of the current envelope of a direction, at either end."""

    def __init__(self) -> None:
        self._whole = torch.empty(HEADER.size + MAX_ROOM, dtype=torch.uint8, device="cpu")
        self._room = 0
        self._bytes: Bytes = self._whole.numpy()
        self.header = self._bytes[: HEADER.size].data
        self.resize(0)

    def resize(self, size: int) -> None:
        """Begins the next envelope, after a payload of ``size`` bytes."""
        room = max(size, MIN_ROOM) if size <= MAX_ROOM else MIN_ROOM
        if room != self._room:
            self._room = room
            self.memory = self._whole[: HEADER.size + room]

    def place(self, size: int) -> Bytes | None:
        """Returns the memory of a payload in the envelope; None: the payload does not fit."""
        return self._bytes[HEADER.size : HEADER.size + size] if size <= self._room else None


class Payload(NamedTuple):
    """Host memory of a message, prepared in the caller's thread.

    Operations of torch release the GIL, and each would cost the other threads a switch.
    """

    tensor: torch.Tensor
    array: Bytes
    """The same memory."""

    @classmethod
    def of(cls, flat: torch.Tensor) -> Payload:
        """``flat``: a contiguous host tensor of any dtype."""
        tensor = tensors.raw(flat)
        return cls(tensor, tensor.numpy())


class Outbox:
    """The sending end of a direction; the works of its lane call :meth:`send`."""

    def __init__(self, comm: Communicator, peer: int) -> None:
        """``peer``: the receiver's rank in ``comm``."""
        self.comm, self._peer = comm, peer
        self.lane = Lane(comm.name)
        self._envelope = _Envelope()

    def send(self, payload: Payload, tag: int) -> None:
        """Returns when the caller may overwrite the memory."""
        size = payload.array.size
        HEADER.pack_into(self._envelope.header, 0, tag, size)
        place = self._envelope.place(size)
        if place is not None:
            place[:] = payload.array
        self.comm.send(self._envelope.memory, self._peer)
        if place is None:
            self.comm.send(payload.tensor, self._peer)
        self._envelope.resize(size)


class Posted(NamedTuple):
    """A receive, posted to an :class:`Inbox`."""

    tag: int
    into: Payload
    work: R2cclWork
    """Delivers the message after its arrival in ``into``."""
    on_gpu: bool
    """The delivery may wait for a GPU."""


class Inbox:
    """The receiving end of a direction: posted receives, early messages, and the reader's thread.

    A group ends an inbox like a :class:`Lane`: by :meth:`drain` and :meth:`close`.
    """

    def __init__(self, comm: Communicator, peer: int) -> None:
        """``peer``: the sender's rank in ``comm``."""
        self.comm, self._peer = comm, peer
        self._envelope = _Envelope()
        self._changed = threading.Condition()
        self._posted: dict[int, deque[Posted]] = {}  # by tag, oldest first; no empty queues
        self._early: dict[int, deque[Bytes]] = {}  # likewise
        self._filling: Posted | None = None  # matched by the reader; its message is being read
        self._kept, self._warn_at = 0, MANY_BYTES  # bytes of early messages
        self._failed: BaseException | None = None
        self._closing = False
        self._reader: threading.Thread | None = None
        self._copies = Lane(f"{comm.name}:copies")  # to GPUs; the reader must not wait for a GPU
        watch(self)

    def post(self, posted: Posted) -> R2cclWork:
        """Returns the receive's work, which may have ended already."""
        with self._changed:
            early, failed = _pop(self._early, posted.tag), self._failed
            self._kept -= 0 if early is None else early.size
            if early is None and failed is None:
                self._start_reader()
                self._posted.setdefault(posted.tag, deque()).append(posted)
                self._posted[posted.tag][0].work.begin()
                self._changed.notify_all()
        if early is not None:
            self._fill(posted, early)
        elif failed is not None:
            posted.work.refuse(failed)
        return posted.work

    def drain(self, limit_s: float) -> bool:
        """Waits at most ``limit_s`` seconds for the end of all receives; returns whether ended."""
        until_s = time.monotonic() + limit_s
        with self._changed:
            ended = self._changed.wait_for(lambda: not self._unfilled(), limit_s)
        return self._copies.drain(max(0.0, until_s - time.monotonic())) and ended

    def close(self, why: BaseException) -> None:
        """Ends waiting receives with ``why`` and refuses more; returns when none is running.

        The caller has made sure that no call of the communicator waits. Garbage collection may call
        this method in the reader's thread.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join()
        self._fail(why)
        self._early.clear()
        self._copies.close(why)

    def end_what_is_overdue(self) -> None:
        with self._changed:
            posted = self._unfilled()
        for each in posted:
            each.work.end_if_overdue()

    def after_fork(self) -> None:
        """Refuses all receives in a forked child; see :meth:`Lane.after_fork`."""
        error = InvalidArgumentError(made_before_fork("process group"))
        posted = self._unfilled()
        self._changed, self._reader, self._failed = threading.Condition(), None, error
        self._posted.clear()
        self._early.clear()
        for each in posted:
            each.work.forsake(error)

    # ---- matching, with the lock held ----

    def _match(self, tag: int) -> Posted | None:
        """Takes the oldest receive of ``tag``; the timeout of the next receive begins."""
        posted = self._filling = _pop(self._posted, tag)
        if tag in self._posted:
            self._posted[tag][0].work.begin()
        return posted

    def _unfilled(self) -> list[Posted]:
        waiting = [posted for queue in self._posted.values() for posted in queue]
        return waiting if self._filling is None else [self._filling, *waiting]

    # ---- the reader's thread ----

    def _start_reader(self) -> None:
        if self._reader is None:
            reader = threading.Thread(target=self._read, name=self.comm.name, daemon=True)
            reader.start()
            self._reader = reader

    def _read(self) -> None:
        try:
            while self._wanted():
                self._read_message()
        except BaseException as error:  # noqa: BLE001  raised by the wait of each receive
            self.comm.abort(str(error))
            self._fail(error)
            if self._filling is not None:
                self._filling.work.refuse(error)
                self._filled()

    def _wanted(self) -> bool:
        with self._changed:
            self._filled()
            self._changed.wait_for(lambda: self._closing or bool(self._posted))
            return not self._closing

    def _filled(self) -> None:
        with self._changed:
            self._filling = None
            self._changed.notify_all()

    def _read_message(self) -> None:
        self.comm.recv(self._envelope.memory, self._peer)
        tag, size = HEADER.unpack_from(self._envelope.header)
        message = self._envelope.place(size)
        self._envelope.resize(size)
        with self._changed:
            posted = self._match(tag)
        if message is not None:
            if posted is None:
                message = message.copy()
        elif posted is not None and posted.into.array.size == size:
            self.comm.recv(posted.into.tensor, self._peer)
            self._deliver(posted)
            return
        else:
            memory = torch.empty(size, dtype=torch.uint8, device="cpu")
            self.comm.recv(memory, self._peer)
            message = memory.numpy()
        if posted is None:
            with self._changed:
                posted = self._match(tag)  # posted while the message was read
                if posted is None:
                    self._keep(tag, message)
                    return
        self._fill(posted, message)

    def _keep(self, tag: int, message: Bytes) -> None:
        self._early.setdefault(tag, deque()).append(message)
        self._kept += message.size
        if self._kept >= self._warn_at:
            self._warn_at = 2 * self._kept
            _LOG.warning(
                "%s: %d bytes of messages wait in memory for their receives (tags %s), while a "
                "receive of another tag waits",
                self.comm.name,
                self._kept,
                sorted(self._early)[:8],
            )

    # ---- ends of receives, in the reader's or the caller's thread ----

    def _fill(self, posted: Posted, message: Bytes) -> None:
        if posted.into.array.size == message.size:
            posted.into.array[:] = message
            self._deliver(posted)
            return
        posted.work.refuse(
            OrderMismatchError(
                f"{posted.work.what}: the message has {message.size} bytes; the tensor must have "
                f"as many, but has {posted.into.array.size} bytes"
            )
        )

    def _deliver(self, posted: Posted) -> None:
        if posted.on_gpu:
            self._copies.add(posted.work, wait=False)
        else:
            posted.work.execute()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failed = self._failed or error
            refused = [posted for queue in self._posted.values() for posted in queue]
            self._posted.clear()
            self._changed.notify_all()
        for posted in refused:
            posted.work.refuse(error)


_T = TypeVar("_T")


def _pop(queues: dict[int, deque[_T]], tag: int) -> _T | None:
    """Takes the oldest entry of ``tag``, and the queue with its last entry."""
    queue = queues.get(tag)
    if queue is None:
        return None
    oldest = queue.popleft()
    if not queue:
        del queues[tag]
    return oldest
