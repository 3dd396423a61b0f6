"""Tags of point-to-point messages, over a wire in memory instead of a communicator."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timely import timely

from r2serve.engines.torch.lane import R2cclWork
from r2serve.engines.torch.point_to_point import (
    HEADER,
    MAX_ROOM,
    MIN_ROOM,
    Inbox,
    Outbox,
    Payload,
    Posted,
    check_tag,
)
from r2serve.errors import (
    AbortedError,
    InvalidArgumentError,
    OrderMismatchError,
    PeerClosedError,
    PeerLostError,
)

SIZES = (0, 1, MIN_ROOM, MIN_ROOM + 1, 1000, MAX_ROOM, MAX_ROOM + 1, 100_000)


class Wire:
    """A communicator with one direction: an ordered stream of messages of fixed sizes."""

    name = "0>1"

    def __init__(self) -> None:
        self.messages: queue.Queue[bytes | Exception] = queue.Queue()
        self.aborts: list[str] = []
        self.before_recv: Callable[[torch.Tensor], None] = lambda _: None

    def send(self, tensor: torch.Tensor, _: int) -> None:
        self.messages.put(tensor.numpy().tobytes())

    def recv(self, tensor: torch.Tensor, _: int) -> None:
        self.before_recv(tensor)
        message = self.messages.get(timeout=120)
        if isinstance(message, Exception):
            self.messages.put(message)  # an error of a communicator is sticky
            raise message
        assert len(message) == tensor.numel()
        tensor.numpy()[:] = list(message)

    def abort(self, text: str) -> None:
        self.aborts.append(text)
        self.messages.put(AbortedError(text))


class Ends:
    """Both ends of a direction."""

    def __init__(self) -> None:
        self.wire = Wire()
        comm: Any = self.wire
        self.outbox, self.inbox = Outbox(comm, 1), Inbox(comm, 0)

    def send(self, tag: int, size: int, value: int = 0) -> None:
        self.outbox.send(Payload.of(torch.full((size,), value, dtype=torch.uint8)), tag)

    def post(
        self,
        tag: int,
        size: int,
        *,
        timeout_s: float = 60.0,
        run: Callable[[], object] = lambda: None,
        on_gpu: bool = False,
    ) -> R2cclWork:
        memory = torch.full((size,), 255, dtype=torch.uint8)
        work = R2cclWork(
            f"receive of tag {tag}", lambda: (run(), None)[1], [memory], timeout_s, self.wire.abort
        )
        return self.inbox.post(Posted(tag, Payload.of(memory), work, on_gpu))

    def close(self) -> None:
        if not self.inbox.drain(0):
            self.wire.abort("the test is over")
        self.inbox.close(PeerClosedError("the test is over"))

    def read_early(self, tag: int) -> None:
        """Makes the reader read all messages of the wire: waits for a message sent now."""
        self.send(tag, 1)
        assert self.post(tag, 1).wait()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def value(work: R2cclWork) -> int:
    """Waits for a receive; returns the value of all of its bytes."""
    [memory] = work.result()
    [only] = memory.unique().tolist()
    return int(only)


def test_messages_are_received_in_any_order_of_tags(ends: Ends) -> None:
    for tag in (1, 2, 3):
        ends.send(tag, 5, tag)
    for tag in (3, 1, 2):
        assert value(ends.post(tag, 5)) == tag


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[int], list[bool]]:
    """Returns messages (tag, size), tags of receives, and an order of sends and receives."""
    messages = draw(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(SIZES)), max_size=25))
    receives = draw(st.permutations([tag for tag, _ in messages]))
    return messages, receives, draw(st.permutations([True, False] * len(messages)))


@settings(deadline=None, max_examples=150)
@given(plans(), st.sets(st.integers(0, 24), max_size=3))
def test_receives_get_the_messages_of_their_tag_in_order(
    plan: tuple[list[tuple[int, int]], list[int], list[bool]], wrong: set[int]
) -> None:
    """The model is a queue for each tag. ``wrong`` are receives of a wrong size."""
    messages, receives, order = plan
    model: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, (tag, size) in enumerate(messages):
        model[tag].append((size, number))
    sends, tags = iter(enumerate(messages)), iter(enumerate(receives))
    ends = Ends()
    posted = []
    try:
        for sending in order:
            if sending:
                number, (tag, size) = next(sends)
                ends.send(tag, size, number)
            else:
                at, tag = next(tags)
                size, number = model[tag].pop(0)
                posted.append((ends.post(tag, size + (at in wrong)), at, size, number))
        for work, at, size, number in posted:
            if at in wrong:
                with pytest.raises(OrderMismatchError, match=f"{size} bytes.* {size + 1} bytes"):
                    work.wait()
            else:
                assert work.result()[0].tolist() == [number] * size
        assert ends.inbox.drain(60)
        assert not ends.inbox._posted
        assert not ends.inbox._early
        assert not ends.wire.aborts
    finally:
        ends.close()


def test_a_waiting_receive_holds_up_no_other_tag(ends: Ends) -> None:
    waiting = ends.post(1, 4)
    ends.send(2, 4, 20)
    assert value(ends.post(2, 4)) == 20
    ends.send(3, 4, 30)
    ends.read_early(9)
    early = ends.post(3, 4)
    assert early.is_completed()  # in the caller's thread, while the reader waits
    assert value(early) == 30
    assert not waiting.is_completed()
    ends.send(1, 4, 10)
    assert value(waiting) == 10


def test_only_a_waiting_receive_reads_the_stream(ends: Ends) -> None:
    """Otherwise the receiver's memory would grow, and nothing would hold the sender back."""
    for tag in (1, 2, 3):
        ends.send(tag, 10, tag)
    assert value(ends.post(1, 10)) == 1
    time.sleep(0.05)
    assert ends.wire.messages.qsize() == 2
    assert not ends.inbox._early


def test_a_receive_posted_while_its_message_is_read_gets_the_message(ends: Ends) -> None:
    posted: list[R2cclWork] = []

    def post(memory: torch.Tensor) -> None:
        if memory.numel() == 100_000:
            posted.append(ends.post(2, 100_000))

    ends.wire.before_recv = post
    ends.send(2, 100_000, 7)
    ends.read_early(1)
    assert value(posted[0]) == 7
    assert not ends.inbox._early


@pytest.mark.parametrize(
    ("size", "messages"),
    [(0, [1, 1, 1]), (8, [1, 1, 1]), (1000, [2, 1, 1]), (MAX_ROOM, [2, 1, 1]), (100_000, [2] * 3)],
)
def test_small_payloads_of_constant_size_travel_with_their_header(
    ends: Ends, size: int, messages: list[int]
) -> None:
    counts = []
    for _ in messages:
        before = ends.wire.messages.qsize()
        ends.send(0, size)
        counts.append(ends.wire.messages.qsize() - before)
    assert counts == messages


@pytest.mark.parametrize("size", [8, 100_000])
@pytest.mark.parametrize("early", [False, True])
def test_a_receive_of_another_size_ends_in_an_error(ends: Ends, size: int, early: bool) -> None:
    ends.send(1, size, 1)
    ends.send(1, size, 2)
    if early:
        ends.read_early(9)
    with pytest.raises(OrderMismatchError, match=rf"tag 1: .* {size} bytes; .* 5 bytes"):
        ends.post(1, 5).wait()
    assert value(ends.post(1, size)) == 2


@pytest.mark.parametrize("tag", [-1, 2**63])
def test_a_tag_outside_the_header_is_refused(tag: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"tag: {tag}; must be"):
        check_tag(tag)
    check_tag(2**63 - 1)


def test_an_error_of_the_communicator_ends_all_receives(ends: Ends) -> None:
    ends.send(1, 3, 1)
    ends.read_early(9)
    waiting = [ends.post(tag, 3) for tag in (2, 2, 3)]
    ends.send(2, 3, 2)
    ends.wire.messages.put(PeerLostError("rank 0 is lost"))
    assert value(waiting[0]) == 2
    for work in (*waiting[1:], ends.post(4, 3)):
        with pytest.raises(PeerLostError, match="rank 0 is lost"):
            work.wait()
    assert value(ends.post(1, 3)) == 1  # read before the error


def test_an_error_during_a_payload_ends_its_receive(ends: Ends) -> None:
    ends.wire.messages.put(HEADER.pack(1, 100_000) + bytes(MIN_ROOM))
    ends.wire.messages.put(PeerLostError("rank 0 is lost"))
    with pytest.raises(PeerLostError, match="rank 0 is lost"):
        ends.post(1, 100_000).wait()
    assert ends.inbox.drain(60)


def test_a_message_beyond_the_memory_ends_the_direction_at_both_ends(ends: Ends) -> None:
    ends.wire.messages.put(HEADER.pack(1, 2**62) + bytes(MIN_ROOM))
    with pytest.raises(RuntimeError, match="memory"):
        ends.post(2, 1).wait()
    assert "memory" in ends.wire.aborts[0]


def test_the_timeout_of_a_receive_begins_with_the_end_of_the_one_before(ends: Ends) -> None:
    first, second = ends.post(1, 1, timeout_s=60), ends.post(1, 1, timeout_s=0.05)
    other = ends.post(2, 1, timeout_s=60)
    time.sleep(0.1)
    ends.inbox.end_what_is_overdue()
    assert not ends.wire.aborts
    ends.send(1, 1)
    assert first.wait()
    timely(
        lambda: ends.inbox.end_what_is_overdue() or ends.wire.aborts,
        "the second is overdue",
    )
    for work in (second, other):
        with pytest.raises(AbortedError, match=r"receive of tag 1 has not ended within 0.05 s"):
            work.wait()


def test_a_closed_inbox_ends_waiting_receives_and_refuses_more(ends: Ends) -> None:
    ends.send(1, 1)
    ends.read_early(9)
    waiting = ends.post(2, 1)
    assert not ends.inbox.drain(0.01)
    ends.wire.abort("shut down")
    ends.inbox.close(PeerClosedError("it is over"))
    with pytest.raises(AbortedError, match="shut down"):
        waiting.wait()
    for tag in (1, 2):
        with pytest.raises((AbortedError, PeerClosedError)):
            ends.post(tag, 1).wait()
    assert ends.inbox._reader is not None
    assert not ends.inbox._reader.is_alive()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("early", [False, True])
def test_an_inbox_can_be_closed_from_within(ends: Ends, early: bool) -> None:
    """Garbage collection may close an inbox."""
    if early:
        ends.send(1, 1)
        ends.read_early(9)
    work = ends.post(1, 1, run=lambda: ends.inbox.close(PeerClosedError("it is over")))
    if not early:
        ends.send(1, 1)
    assert work.wait()
    with pytest.raises(PeerClosedError, match="it is over"):
        ends.post(2, 1).wait()


@pytest.mark.timeout(120)
def test_a_copy_to_a_gpu_holds_up_no_other_tag(ends: Ends) -> None:
    go = threading.Event()
    copied = ends.post(1, 1, run=lambda: go.wait(120), on_gpu=True)
    ends.send(1, 1)
    ends.send(2, 1)
    assert ends.post(2, 1).wait()
    assert not copied.is_completed()
    assert not ends.inbox.drain(0.01)
    go.set()
    assert copied.wait()
    assert ends.inbox.drain(60)


@pytest.mark.timeout(120)
def test_a_closed_inbox_starts_no_more_copies(ends: Ends) -> None:
    begun, go = threading.Event(), threading.Event()

    def copy() -> None:
        begun.set()
        go.wait(120)

    running, waiting = (ends.post(tag, 1, run=copy, on_gpu=True) for tag in (1, 2))
    for tag in (1, 2):
        ends.send(tag, 1)
    ends.read_early(9)
    assert begun.wait(120)
    closing = threading.Thread(target=ends.inbox.close, args=(PeerClosedError("it is over"),))
    closing.start()
    timely(lambda: ends.inbox._copies._closed is not None, "the inbox is being closed")
    go.set()
    closing.join(120)
    assert running.wait()
    with pytest.raises(PeerClosedError, match="it is over"):
        waiting.wait()


def test_threads_and_memory_do_not_grow_with_tags(ends: Ends) -> None:
    ends.read_early(0)
    threads = Counter(thread.name for thread in threading.enumerate())
    for tag in range(1, 500, 2):
        ends.send(tag, 10, 1)
        ends.send(tag + 1, 10, 2)
        assert value(ends.post(tag + 1, 10)) == 2
        assert value(ends.post(tag, 10)) == 1
    assert Counter(thread.name for thread in threading.enumerate()) == threads
    assert not ends.inbox._posted
    assert not ends.inbox._early


def test_many_early_bytes_are_told_in_the_log(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A receive that waits for long makes the messages of all other tags pile up."""
    monkeypatch.setattr(ends.inbox, "_warn_at", 40)
    for tag in range(1, 21):
        ends.send(tag, 8)
    ends.read_early(99)
    told = [record.getMessage() for record in caplog.records if "wait in memory" in record.message]
    assert 1 <= len(told) <= 3  # at 40 bytes, and each time that the size has doubled
    for tag in range(1, 21):
        assert ends.post(tag, 8).wait()
    assert ends.inbox._kept == 0


def test_a_forked_child_refuses_and_ends_the_parents_receives() -> None:
    """The handler of a fork, called without a fork: nothing may hang."""
    ends = Ends()
    waiting = ends.post(1, 1), ends.post(1, 1)
    reader = ends.inbox._reader
    ends.inbox.after_fork()
    for work in (*waiting, ends.post(2, 1)):
        with pytest.raises(InvalidArgumentError, match="before a fork"):
            work.wait()
    ends.wire.abort("the test is over")
    assert reader is not None
    reader.join(120)
