"""Communicators of GPUs, over real links; without a GPU, on the fake driver."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from captured import Captured, Looks
from ports import free_port
from timely import timely

from r2serve import _core, device
from r2serve.communicator import Communicator
from r2serve.config import Config
from r2serve.device import DeviceCommunicator
from r2serve.errors import (
    AbortedError,
    ConfigError,
    InternalError,
    InvalidArgumentError,
    OrderMismatchError,
)
from r2serve.observe import journal

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")
STAGING = 1024**2
# On a GPU a turn takes 0.5 to 1.2 ms; 5,000 leave room for 250 cut rails within RESULT_TIMEOUT_S.
REPLAYS = int(os.environ.get("R2SERVE_TEST_REPLAYS", "5000" if HAS_GPU else "200"))
RESULT_TIMEOUT_S = 300


def settle() -> None:
    """Waits for the work in the streams; without a GPU the work is done when a call returns."""
    if HAS_GPU:
        torch.cuda.synchronize()


class Ranks:
    """Two ranks of this process, each with separate links and a separate stream."""

    def __init__(self, library: str) -> None:
        self.pool = ThreadPoolExecutor(2)
        self.options: dict[str, Any] = {"cuda_library": library, "gpu_staging_bytes": STAGING}
        self.streams = [torch.cuda.Stream() if HAS_GPU else None for _ in range(2)]

    def make(self, **of_rank_1: Any) -> list[DeviceCommunicator]:
        port = free_port()

        def one(rank: int) -> DeviceCommunicator:
            options = self.options | (of_rank_1 if rank == 1 else {})
            config = Config(
                rails="127.0.0.1,127.0.0.2",
                node=f"n{rank}",
                rejoin_backoff_min_ms=1,
                flap_half_life_s=0.0,  # rails cut a thousand times come back at once
                **options,
            )
            host = Communicator.standalone(
                "127.0.0.1", port, rank, 2, name="tp", config=config, share_engine=False
            )
            try:
                return DeviceCommunicator(host, DEVICE)
            except BaseException:
                host.close()
                raise

        return self.run(one, range(2))

    def run(self, call: Callable[[Any], Any], of_ranks: Any) -> list[Any]:
        """Runs `call` on both ranks at the same time."""

        def in_stream(rank: int, given: Any) -> Any:
            stream = self.streams[rank]
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                return call(given)

        started = [self.pool.submit(in_stream, *each) for each in enumerate(of_ranks)]
        return [each.result(RESULT_TIMEOUT_S) for each in started]


@pytest.fixture
def ranks(cuda_driver: str) -> Iterator[Ranks]:
    made = Ranks(cuda_driver)
    yield made
    made.pool.shutdown()


@pytest.fixture
def pair(ranks: Ranks) -> Iterator[list[DeviceCommunicator]]:
    made = ranks.make()
    yield made
    ranks.run(DeviceCommunicator.close, made)


def bring(rank: int, *shape: int, device: torch.device = DEVICE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(device)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device=DEVICE)


# Each case gets a communicator, the rank, and a function for the rank's input: bring(*shape).
CASES: dict[str, Callable[[Any, int, Any], Any]] = {
    "all_reduce": lambda c, r, b: c.all_reduce(b(7, 5)),
    "all_reduce in place": lambda c, r, b: c.all_reduce(x := b(7, 5), out=x),
    "all_reduce in slices": lambda c, r, b: c.all_reduce(b(3, STAGING // 4 + 5), "max"),
    "all_gather": lambda c, r, b: c.all_gather(b(7, 5)),
    "all_gather in slices": lambda c, r, b: c.all_gather(b(STAGING // 4 + 5)),
    "all_gatherv": lambda c, r, b: c.all_gatherv(b((3, 0)[r], 5), [3, 0]),
    "reduce_scatter": lambda c, r, b: c.reduce_scatter(b(6, 5)),
    "reduce_scatterv": lambda c, r, b: c.reduce_scatterv(b(7, 5), [2, 5], "avg"),
    "broadcast": lambda c, r, b: c.broadcast(b(7), 1),
    "gather": lambda c, r, b: c.gather(b(7), 1),
    "all_to_all": lambda c, r, b: c.all_to_all(b(6, 5)),
    "all_to_all in place": lambda c, r, b: c.all_to_all(x := b(6, 5), out=x),
    "all_to_all in slices": lambda c, r, b: c.all_to_all(b(STAGING // 2 + 6)),
    "all_to_allv": lambda c, r, b: c.all_to_allv(
        b((3, 5)[r], 2), ([1, 2], [4, 1])[r], ([1, 4], [2, 1])[r]
    ),
    "send": lambda c, r, b: c.send(b(9), 1) if r == 0 else c.recv(b(9), 0),
    "barrier": lambda c, r, b: c.barrier(),
}


@pytest.mark.parametrize("case", CASES)
def test_results_equal_the_hosts_results(case: str, ranks: Ranks, pair: list[Any]) -> None:
    def both(rank: int) -> tuple[Any, Any]:
        communicator = pair[rank]
        got = CASES[case](communicator, rank, functools.partial(bring, rank))
        settle()
        communicator.check()
        on_host = functools.partial(bring, rank, device=torch.device("cpu"))
        return got, CASES[case](communicator.host, rank, on_host)

    for got, expected in ranks.run(both, range(2)):
        assert (got is None) is (expected is None)
        assert got is None or torch.equal(got.cpu(), expected)


def test_wrong_input_is_refused_before_anything_is_sent(ranks: Ranks, pair: list[Any]) -> None:
    for communicator in pair:
        with pytest.raises(InvalidArgumentError, match="root"):
            communicator.broadcast(ones(3), 2)
        with pytest.raises(InvalidArgumentError, match=f"is on meta; this .* on {DEVICE}"):
            communicator.all_reduce(torch.ones(3, device="meta"))
        with pytest.raises(InvalidArgumentError, match="not contiguous"):
            communicator.all_reduce(ones(3, 4).t())
    for total in ranks.run(lambda each: each.all_reduce(ones(3)), pair):
        assert total.tolist() == [2.0, 2.0, 2.0]


def reduce_and_ask(communicator: Any, target: torch.Tensor) -> None:
    communicator.all_reduce(ones(3), out=target)
    settle()
    communicator.check()


def test_an_abort_is_raised_by_checks_and_leaves_results_unchanged(
    ranks: Ranks, pair: list[Any]
) -> None:
    device.check_all()
    target = 7 * ones(3)
    pair[0].abort("the test wants it")
    with pytest.raises(AbortedError):
        reduce_and_ask(pair[1], target)
    assert target.tolist() == [7.0, 7.0, 7.0]
    with pytest.raises(AbortedError, match="the test wants it"):
        device.check_all()
    ranks.run(DeviceCommunicator.close, pair)
    device.check_all()  # no error: the communicator with the abort is closed


@pytest.mark.parametrize(
    ("size", "replays"),
    [
        (4096, REPLAYS),
        (STAGING // 4 + 100, REPLAYS // (5 if HAS_GPU else 2)),  # two slices of an all-reduce
    ],
)
def test_a_graph_is_replayed_while_rails_are_cut_and_healed(
    ranks: Ranks, pair: list[Any], cuda_driver: str, size: int, replays: int
) -> None:
    """Replays run one at a time, so every result is compared."""
    captured_by_all = threading.Barrier(2)

    def rank_main(rank: int) -> int:
        communicator = pair[rank]
        source, total = torch.zeros(size, device=DEVICE), torch.zeros(size, device=DEVICE)
        everything = torch.zeros(2, size, device=DEVICE)

        def body() -> None:
            communicator.all_reduce(source, out=total)
            communicator.all_gather(total, out=everything)

        captured = Captured(communicator, cuda_driver, body)
        # a capture waits for the device, including the other rank's replays
        captured_by_all.wait(300)
        steps, looks = torch.arange(float(size), device=DEVICE), Looks(DEVICE)
        for turn in range(replays):
            if rank == 0 and turn % 20 == 5:
                communicator.inject(turn // 20 % 2, "carrier_loss")
            if rank == 0 and turn % 20 == 15:
                communicator.inject(turn // 20 % 2, "heal")
            source.copy_(steps + rank + turn % 1000)
            captured.replay()
            captured.synchronise()
            communicator.check()
            expected = 2 * (steps + turn % 1000) + 1
            looks.compare(total, expected)
            looks.compare(everything, expected.expand(2, size))
            looks.end_turn()
        looks.look()
        return sum("->DOWN" in event.text for event in communicator.events())

    assert ranks.run(rank_main, range(2))[0] >= replays // 20


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("gpu_staging_bytes", 2 * STAGING, r"\[1048576, 2097152\]"),
        ("gpu_direct", "off", r"\['auto', 'off'\]"),
        ("gpu_direct_min_bytes", 1, r"\[65536, 1\]"),
    ],
)
def test_ranks_agree_on_their_options(ranks: Ranks, option: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"R2CCL_{option.upper()}.*{said}"):
        ranks.make(**{option: value})


@pytest.fixture
def stepping(ranks: Ranks) -> Iterator[list[DeviceCommunicator]]:
    ranks.options["consensus"] = "step"
    made = ranks.make()
    yield made
    ranks.run(DeviceCommunicator.close, made)


@pytest.mark.parametrize("parts_by", ["graph", "skipped replay", "skipped call", "step"])
def test_ranks_that_part_get_an_error_in_that_step(
    ranks: Ranks, stepping: list[Any], cuda_driver: str, parts_by: str
) -> None:
    captured_by_all = threading.Barrier(2)

    def rank_main(rank: int) -> str:
        communicator = stepping[rank]
        communicator.compare_captures()
        source, total = ones(64), ones(64)

        def body() -> None:
            communicator.all_reduce(source, out=total)

        graphs = [Captured(communicator, cuda_driver, body)]
        graphs.append(Captured(communicator, cuda_driver, body, beside=graphs[0]))
        captured_by_all.wait(300)

        def step(communicator: Any, number: int, parts: str = "") -> None:
            number += parts == "step"
            with communicator.step(number, f"requests of {rank}"):
                graphs[parts == "graph"].replay()
                if parts != "skipped call":
                    communicator.all_reduce(source, out=total)
                if parts != "skipped replay":
                    graphs[0].replay()
            settle()
            graphs[0].synchronise()

        def step_and_check(number: int, parts: str = "") -> None:
            step(communicator, number, parts)
            communicator.check()

        for number in (1, 2):
            step_and_check(number)
        with pytest.raises(OrderMismatchError) as caught:
            step_and_check(3, parts_by if rank == 1 else "")
        return str(caught.value)

    for rank, text in enumerate(ranks.run(rank_main, range(2))):
        assert "step 3" in text
        assert f"requests of {rank}" in text


def test_a_check_of_an_earlier_step_does_not_wait_for_a_later_step(
    ranks: Ranks, stepping: list[Any]
) -> None:
    """Rank 0 has ended a step that rank 1 has not begun; the step before is compared."""
    ended = threading.Event()

    def rank_main(rank: int) -> None:
        communicator = stepping[rank]
        with communicator.step(1):
            communicator.all_reduce(ones(3))
        settle()
        before = device.steps_ended()
        assert before[communicator] == 1
        if rank == 1:
            assert ended.wait(300)
        with communicator.step(2):
            pass
        device.DeviceCommunicator.check(communicator, before[communicator])
        ended.set()
        communicator.check()

    ranks.run(rank_main, range(2))


def test_a_step_out_of_range_is_refused(stepping: list[Any]) -> None:
    for number in (0, 2**32):
        with pytest.raises(InvalidArgumentError, match=f"number: is {number}"):
            stepping[0].step(number)


def test_gpudirect_needs_driver_support(cuda_driver: str, show: Callable[[str], None]) -> None:
    """The driver exports dma-bufs, or GPUDirect is refused with a reason.

    In a virtual machine the export may fail even if the driver supports dma-bufs. So on a GPU the
    test only prints the answer.
    """
    [gpu, *_] = _core.gpus(cuda_driver)
    why_not = _core.why_not_direct(cuda_driver, 0, [])
    if HAS_GPU:
        show(f"GPUDirect of {gpu['name']}: {why_not or 'the driver has what it needs'}")
        assert gpu["dma_buf"] or why_not
    else:
        assert why_not == "" if gpu["dma_buf"] else "dma-buf" in why_not


class Stopped(Exception):
    """Raised by a handler."""


def test_a_handlers_exception_ends_the_start(ranks: Ranks) -> None:
    """Rank 1 sleeps after the agreement, while rank 0 waits for rank 1 in the core."""
    port = free_port()
    over = threading.Event()

    def host(rank: int) -> Communicator:
        config = Config(rails="127.0.0.1", node=f"n{rank}", **ranks.options)
        return Communicator.standalone(
            "127.0.0.1", port, rank, 2, name="tp", config=config, share_engine=False
        )

    def sleep_after_the_agreement() -> None:
        with host(1) as communicator:
            device._agree(communicator)
            assert over.wait(300)

    def waits(communicator: Communicator) -> bool:
        read = journal.parse(communicator._process.engine.journal_bytes(), events=False)
        return any(group.name == "tp/device" and group.call for group in read.groups)

    def send_signal(communicator: Communicator) -> None:
        timely(lambda: waits(communicator), "rank 0 waits for rank 1", 300)
        os.kill(os.getpid(), signal.SIGUSR1)

    def stop(_: int, __: object) -> None:
        raise Stopped

    late = ranks.pool.submit(sleep_after_the_agreement)
    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with host(0) as communicator:
            sender = ranks.pool.submit(send_signal, communicator)
            with pytest.raises(Stopped):
                DeviceCommunicator(communicator, DEVICE)
            sender.result(RESULT_TIMEOUT_S)
    finally:
        signal.signal(signal.SIGUSR1, before)
        over.set()
    late.result(RESULT_TIMEOUT_S)


def test_required_gpudirect_without_support_fails_the_start(ranks: Ranks) -> None:
    ranks.options["gpu_direct"] = "on"
    with pytest.raises(InvalidArgumentError, match=r"gpu_direct: is on.*no rail to .* is RDMA"):
        ranks.make()


def test_the_log_names_the_staging_memory(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "r2serve"):
        for communicator in ranks.make():
            ranks.pool.submit(communicator.close)
    assert "tp: staging in pinned host memory: no rail to" in caplog.text


def test_a_missing_driver_is_named(ranks: Ranks) -> None:
    ranks.options["cuda_library"] = "libcuda_of_no_machine.so.1"
    with pytest.raises(InternalError, match=r"no CUDA driver: libcuda_of_no_machine.so.1"):
        ranks.make()


@pytest.mark.skipif(HAS_GPU, reason="a process that uses CUDA cannot be forked")
def test_a_forked_child_cannot_use_an_inherited_communicator(pair: list[Any]) -> None:
    used, data = pair[0], torch.ones(4)
    calls: list[Callable[[], Any]] = [
        lambda: used.all_reduce(data),
        lambda: used.all_gather(data),
        lambda: used.reduce_scatter(torch.ones(8)),
        lambda: used.broadcast(data, 0),
        lambda: used.gather(data, 0),
        lambda: used.all_to_all(torch.ones(8)),
        lambda: used.send(data, 1),
        lambda: used.recv(data, 1),
        used.barrier,
        used.compare_captures,
        lambda: used.step(1),
        used.end_step,
        used.check,
        lambda: used.abort("so"),
    ]
    child = os.fork()
    if child == 0:
        status = 255
        try:
            for number, call in enumerate(calls, start=1):
                status = number
                with pytest.raises(InvalidArgumentError, match="before a fork"):
                    call()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "number of the call carried out"


@pytest.mark.skipif(HAS_GPU, reason="a process that uses CUDA cannot be forked")
def test_a_forked_child_may_close_an_inherited_communicator(pair: list[Any]) -> None:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            pair[0].close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
