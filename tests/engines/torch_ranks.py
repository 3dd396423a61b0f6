"""Starts the ranks of a torch.distributed job as processes, and checks the results.

    python torch_ranks.py CASE RANKS [gpu]

CASE is the name of a function below; every rank runs this function. With `gpu`, tensors are on the
GPU. On a machine without a GPU, host tensors count as GPU tensors, and R2CCL_CUDA_LIBRARY must name
a driver that accepts these. The exit status is 0 if every rank returned; else tracebacks are shown.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from timely import timely

import r2serve.engines.torch
from r2serve import process
from r2serve.device import check_all
from r2serve.engines.torch import landing
from r2serve.errors import (
    AbortedError,
    InvalidArgumentError,
    OrderMismatchError,
    PeerClosedError,
    PeerLostError,
    R2cclError,
)

SUMMED = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.uint8)
MOVED = (*SUMMED, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16)
SHAPES = ((6,), (4, 3), (2, 4, 5), (0, 4), ())
OPS: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: lambda ranks: ranks.sum(0),
    dist.ReduceOp.PRODUCT: lambda ranks: ranks.prod(0),
    dist.ReduceOp.MIN: lambda ranks: ranks.amin(0),
    dist.ReduceOp.MAX: lambda ranks: ranks.amax(0),
}
OVERDUE_S = 8
"""Timeout of the group in the cases `overdue…`; limits the start of the group, too."""


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Returns the input of a rank: small integers, so that sums are exact in every dtype."""
    count = torch.Size(shape).numel()
    return (torch.arange(count).reshape(shape) % 5 + rank).to(dtype)


def everyone(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    return [values(rank, shape, dtype) for rank in range(dist.get_world_size())]


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    expected = expected.to(got.dtype)
    assert got.shape == expected.shape, (got.shape, expected.shape)
    dense = (tensor.clone(memory_format=torch.contiguous_format) for tensor in (got, expected))
    assert torch.equal(*(tensor.view(-1).view(torch.uint8) for tensor in dense)), (got, expected)


def scattered(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor of zeros whose elements are not contiguous."""
    return torch.zeros((*shape, 2), dtype=dtype)[..., 0]


def targets(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[torch.Tensor]:
    yield torch.zeros(shape, dtype=dtype)
    yield scattered(shape, dtype)


def reductions(me: int, ranks: int) -> None:
    for dtype in SUMMED:
        for shape in SHAPES:
            whole = torch.stack(everyone(shape, dtype))
            for op, expected in OPS.items():
                for tensor in targets(shape, dtype):
                    tensor.copy_(values(me, shape, dtype))
                    dist.all_reduce(tensor, op=op)
                    same(tensor, expected(whole).to(dtype))
            for tensor in targets(shape, dtype):
                tensor.copy_(values(me, shape, dtype))
                dist.reduce(tensor, dst=1)
                same(tensor, whole.sum(0).to(dtype) if me == 1 else values(me, shape, dtype))
            parts = [whole + part for part in range(ranks)]
            for out in targets(shape, dtype):
                dist.reduce_scatter(out, [part[me] for part in parts])
                same(out, parts[me].sum(0).to(dtype))
            if shape:
                for out in targets(shape, dtype):
                    dist.reduce_scatter_tensor(out, torch.cat([part[me] for part in parts]))
                    same(out, parts[me].sum(0).to(dtype))
    average = torch.full((3,), float(me))
    dist.all_reduce(average, op=dist.ReduceOp.AVG)
    same(average, torch.full((3,), (ranks - 1) / 2))
    pair = torch.tensor([1 + 2j, me * 1j])
    dist.all_reduce(pair)
    same(pair, torch.tensor([ranks * (1 + 2j), sum(range(ranks)) * 1j]))
    for op, bits in ((dist.ReduceOp.BAND, 8), (dist.ReduceOp.BOR, 15), (dist.ReduceOp.BXOR, 7)):
        mask = torch.tensor([(8 | 1 << me) if op != dist.ReduceOp.BXOR else 1 << me])
        dist.all_reduce(mask, op=op)
        same(mask, torch.tensor([bits]))
    several = [torch.full((size,), float(me)) for size in (1, 7, 0)]
    dist.all_reduce_coalesced(several)
    for tensor in several:
        same(tensor, torch.full_like(tensor, sum(range(ranks))))


def movements(me: int, ranks: int) -> None:
    for dtype in MOVED:
        for shape in SHAPES:
            mine, all_ranks = values(me, shape, dtype), everyone(shape, dtype)
            outs = [next(targets(shape, dtype)) for _ in range(ranks - 1)]
            outs.append(scattered(shape, dtype))
            dist.all_gather(outs, mine)
            for out, expected in zip(outs, all_ranks, strict=True):
                same(out, expected)
            for tensor in targets(shape, dtype):
                if me == 1:
                    tensor.copy_(mine)
                dist.broadcast(tensor, src=1)
                same(tensor, all_ranks[1])
            into = [torch.zeros(shape, dtype=dtype) for _ in range(ranks)] if me == 0 else None
            dist.gather(mine, into, dst=0)
            for out, expected in zip(into or [], all_ranks, strict=me == 0):
                same(out, expected)
            for out in targets(shape, dtype):
                dist.scatter(out, all_ranks if me == 1 else None, src=1)
                same(out, mine)
            outs = [torch.zeros(shape, dtype=dtype) for _ in range(ranks)]
            dist.all_to_all(outs, all_ranks)
            for out in outs:
                same(out, mine)
            if shape:
                for out in targets((ranks * shape[0], *shape[1:]), dtype):
                    dist.all_gather_into_tensor(out, mine)
                    same(out, torch.cat(all_ranks))
                for out in targets((ranks * shape[0], *shape[1:]), dtype):
                    dist.all_to_all_single(out, torch.cat(all_ranks))
                    same(out, torch.cat([mine] * ranks))
    uneven = [torch.full((rank + 1, 2), float(10 * me + rank)) for rank in range(ranks)]
    got = torch.zeros((ranks * (me + 1), 2))
    sizes = [rank + 1 for rank in range(ranks)]
    dist.all_to_all_single(got, torch.cat(uneven), [me + 1] * ranks, sizes)
    same(got, torch.cat([torch.full((me + 1, 2), float(10 * rank + me)) for rank in range(ranks)]))
    outs = [torch.zeros((me + 1, 2)) for _ in range(ranks)]
    dist.all_to_all(outs, uneven)
    same(torch.cat(outs), got)
    outs = [torch.zeros(size) for size in sizes]
    dist.all_gather(outs, torch.full((me + 1,), float(me)))
    for rank, out in enumerate(outs):
        same(out, torch.full((rank + 1,), float(rank)))
    said: list[Any] = [None] * ranks
    dist.all_gather_object(said, {"rank": me, "text": "x" * me})
    assert said == [{"rank": rank, "text": "x" * rank} for rank in range(ranks)]


def asynchronous(me: int, ranks: int) -> None:
    """Work objects and futures complete in order; compiled code's collectives, too."""
    tensors = [torch.full((1000,), float(me + turn)) for turn in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    ended = [work.get_future().then(lambda done: done.value()[0].clone()) for work in works]
    barrier = dist.barrier(async_op=True)
    for turn, future in enumerate(ended):
        same(future.wait(), torch.full((1000,), float(sum(range(ranks)) + ranks * turn)))
    barrier.wait()
    assert all(work.is_completed() and work.is_success() for work in works)
    group = dist.group.WORLD
    assert group is not None
    same(functional.all_reduce(torch.ones(3), "sum", group).clone(), torch.full((3,), float(ranks)))
    same(
        functional.all_gather_tensor(torch.full((2,), float(me)), 0, group).clone(),
        torch.arange(ranks).repeat_interleave(2).float(),
    )
    same(
        functional.reduce_scatter_tensor(torch.ones(ranks), "sum", 0, group).clone(),
        torch.tensor([float(ranks)]),
    )


def layouts(me: int, ranks: int) -> None:
    """Work objects keep their order with non-contiguous tensors and with all kinds of views."""
    for tensor in targets((3,), torch.float32):
        tensor.fill_(me)
        outs = [torch.zeros(3) for _ in range(ranks)]
        works = [
            dist.broadcast(tensor, src=1, async_op=True),
            dist.all_reduce(tensor, async_op=True),
            dist.all_to_all(outs, [tensor] * ranks, async_op=True),
        ]
        for work in works:
            work.wait()
        same(tensor, torch.full((3,), float(ranks)))
        same(torch.stack(outs), torch.full((ranks, 3), float(ranks)))
    complex_ones = torch.full((2,), 1j * (me + 1))
    negated = complex_ones.conj().imag  # a view with torch's negative bit: reading negates
    assert negated.is_neg()
    dist.broadcast(negated, src=1)
    same(negated.clone(), torch.full((2,), -2.0))
    same(complex_ones.imag, torch.full((2,), 2.0))
    with torch.inference_mode():
        strided = scattered((3,), torch.float32)
        works = [
            dist.irecv(strided, (me - 1) % ranks),
            dist.isend(torch.full((3,), float(me)), (me + 1) % ranks),
        ]
        for work in works:
            assert work is not None
            work.wait()
        same(strided, torch.full((3,), float((me - 1) % ranks)))


def hooks(me: int, ranks: int) -> None:
    """DDP with a communication hook whose callbacks start and wait for collectives."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(5):
        torch.manual_seed(100 * step + me)
        model(torch.randn(4, 64)).square().mean().backward()
        gradients = [torch.empty_like(model.module.weight) for _ in range(ranks)]
        assert model.module.weight.grad is not None
        dist.all_gather(gradients, model.module.weight.grad)
        for gradient in gradients:
            same(gradient, gradients[0])


def death_in_training(me: int, ranks: int) -> None:
    """backward() raises the error; C++ waits for a future, not for a work object."""
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    model(torch.randn(4, 64)).mean().backward()
    dist.barrier()
    if me == 0:
        os._exit(0)
    refused(RuntimeError, "rank 0", lambda: model(torch.randn(4, 64)).mean().backward())


def tell(what: str, me: int) -> None:
    """Tells the other ranks that this rank has come to a point of the test."""
    Path(os.environ["STORE_FOLDER"], f"{what}-{me}").touch()


def hear(what: str, ranks: Iterable[int]) -> None:
    """Waits until the ranks have come to a point of the test."""
    marks = [Path(os.environ["STORE_FOLDER"], f"{what}-{rank}") for rank in ranks]
    timely(lambda: all(mark.exists() for mark in marks), f"ranks: {what}", within_s=100)


def aborted(me: int, ranks: int) -> None:
    """A rank without a running collective aborts a group, and the waits of other ranks end."""
    group = dist.group.WORLD
    assert group is not None
    dist.barrier()
    if me == 0:
        time.sleep(0.5)
        group.abort()
        refused(PeerClosedError, "shut down", lambda: dist.barrier())
        refused(PeerClosedError, "shut down", lambda: group.send([torch.ones(1)], 1, 0))
        hear("aborted", range(1, ranks))  # an early exit would look like a closed peer
        return
    # The timeout of the group would give another error.
    refused(AbortedError, "was aborted", lambda: dist.barrier())
    tell("aborted", me)


def again(me: int, ranks: int) -> None:
    """A process group is destroyed and created again, over a store used before."""
    dist.destroy_process_group()
    folder = os.environ["STORE_FOLDER"]
    store = dist.FileStore(f"{folder}/again", ranks)
    for _ in range(3):
        dist.init_process_group(
            r2serve.engines.torch.BACKEND,
            store=store,
            rank=me,
            world_size=ranks,
        )
        ones = torch.ones(2)
        dist.all_reduce(ones)
        same(ones, torch.full((2,), float(ranks)))
        dist.destroy_process_group()


def point_to_point(me: int, ranks: int) -> None:
    after, before = (me + 1) % ranks, (me - 1) % ranks
    big, got = torch.full((2_000_000,), float(me)), torch.zeros(2_000_000)
    works = [dist.isend(big, after), dist.irecv(got, before)]  # every rank sends before it receives
    for work in works:
        assert work is not None
        work.wait()
    same(got, torch.full_like(got, before))
    # Messages are received in another order than sent, with a collective in between.
    sends = [dist.isend(torch.full((3,), float(tag)), after, tag=tag) for tag in range(3)]
    for tag in (2, 0, 1):
        small = torch.zeros(3)
        dist.recv(small, before, tag=tag)
        same(small, torch.full((3,), float(tag)))
        dist.all_reduce(small)
    for send in sends:
        assert send is not None
        send.wait()
    batch = [
        dist.P2POp(dist.isend, big, before),
        dist.P2POp(dist.irecv, got, after),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    same(got, torch.full_like(got, after))


def tags(me: int, ranks: int) -> None:
    """Both directions at once; the messages are received in another order of tags than sent."""
    peer, generator = 1 - me, torch.Generator("cpu").manual_seed(3)
    plan = [
        (int(torch.randint(4, (), generator=generator, device="cpu")), shape, dtype)
        for shape in ((3,), (0,), (1,), (), (2, 500), (40_000,), (1_500_000,))
        for dtype in MOVED
    ]
    sent, received = [], []
    for number, (tag, shape, dtype) in enumerate(plan):
        sent.append(dist.isend(values(number + me, shape, dtype), peer, tag=tag))
    for wanted in (2, 0, 3, 1):
        for number, (tag, shape, dtype) in enumerate(plan):
            if tag == wanted:
                with torch.inference_mode(number % 3 == 0):
                    out = list(targets(shape, dtype))[number % 2]
                    received.append((dist.irecv(out, peer, tag=tag), out, number))
    for work, out, number in received:
        assert work is not None
        work.wait()
        same(out, values(number + peer, *plan[number][1:]))
    for work in sent:
        assert work is not None
        work.wait()


def wrong_sizes(me: int, ranks: int) -> None:
    """A receive of a wrong size ends in an error; the direction carries further messages."""
    group = dist.group.WORLD
    assert group is not None
    for count in (3, 100_000):
        if me == 0:
            for tag in (5, 6, 5):
                dist.send(torch.full((count,), float(tag)), 1, tag=tag)
        else:
            got, words = (
                torch.zeros(count),
                f"rank 1 from rank 0, tag 5: the message has {4 * count}",
            )
            refused(OrderMismatchError, words, lambda: dist.recv(torch.zeros(2), 0, tag=5))
            for tag in (5, 6):
                dist.recv(got, 0, tag=tag)
                same(got, torch.full((count,), float(tag)))
        dist.barrier()
    refused(InvalidArgumentError, "tag: -1", lambda: group.send([torch.ones(1)], 1 - me, -1))
    refused(InvalidArgumentError, "tag: -1", lambda: group.recv([torch.ones(1)], 1 - me, -1))


def many_tags(me: int, ranks: int) -> None:
    """Neither threads nor communicators grow with the number of tags."""
    peer = 1 - me

    def exchange(tag: int) -> None:
        got = torch.zeros(2)
        work = dist.isend(torch.full((2,), float(tag + me)), peer, tag=tag)
        dist.recv(got, peer, tag=tag)
        assert work is not None
        work.wait()
        same(got, torch.full((2,), float(tag + peer)))

    def counts() -> tuple[int, int]:
        return threading.active_count(), sum(process._USERS.values())

    exchange(0)
    before = counts()
    for tag in range(1, 2000):
        exchange(tag)
    assert counts() == before, (counts(), before)


def overdue_tag(me: int, ranks: int) -> None:
    """The timeout of a receive ends the receives of its direction on this rank; not the others."""
    dist.barrier()
    if me == 1:
        works = [dist.irecv(torch.ones(1), 0, tag=tag) for tag in (1, 2)]
        words = f"from rank 0, tag 1 has not ended within {OVERDUE_S} s"
        for work in works:
            assert work is not None
            refused(AbortedError, words, work.wait)
        tell("overdue", me)
        dist.send(torch.ones(1), 0)
    else:
        hear("overdue", [1])
        refused_soon("tag 1 has not ended", lambda: dist.send(torch.ones(1), 1, tag=2))
        dist.recv(torch.zeros(1), 1)
    dist.barrier()


def groups(me: int, ranks: int) -> None:
    """Groups: of several ranks, of a single rank, created twice, and destroyed."""
    pair = dist.new_group([0, 1])
    alone = [dist.new_group([rank]) for rank in range(ranks)][me]
    again = dist.new_group([0, 1])
    one = torch.ones(2)
    dist.all_reduce(one, group=alone)
    dist.barrier(group=alone)
    same(one, torch.ones(2))
    if me < 2:
        for group in (pair, again):
            both = torch.full((2,), float(me + 1))
            dist.all_reduce(both, group=group)
            same(both, torch.full((2,), 3.0))
        dist.destroy_process_group(pair)
    dist.barrier()


def refused(
    expected: type[Exception] | tuple[type[Exception], ...], words: str, call: Callable[[], Any]
) -> None:
    with pytest.raises(expected) as caught:
        call()
    assert words in str(caught.value)


def refused_soon(words: str, call: Callable[[], None]) -> None:
    """Repeats a call until another rank's abort ends it: its data may arrive before its abort."""

    def error_of_call() -> str:
        try:
            call()
        except AbortedError as error:
            return str(error)
        return ""

    assert words in timely(error_of_call, f"AbortedError: {words}", within_s=100)


def mistakes(me: int, ranks: int) -> None:
    """Each mistake is refused with the name of the argument, and leaves the group usable."""
    one, some = torch.ones(ranks), [torch.ones(1) for _ in range(ranks)]
    floats8 = one.to(torch.float8_e4m3fn)
    premul = dist._make_nccl_premul_sum(2.0) if hasattr(dist, "_make_nccl_premul_sum") else None
    refused(R2cclError, "float8_e4m3fn", lambda: dist.all_reduce(floats8))
    if premul is not None:
        refused(R2cclError, "op:", lambda: dist.all_reduce(one, op=premul))
    refused(R2cclError, "bitwise", lambda: dist.all_reduce(one, op=dist.ReduceOp.BAND))
    refused(R2cclError, "layout", lambda: dist.broadcast(one.to_sparse(), src=0))
    refused(NotImplementedError, "src", lambda: dist.recv(one))
    refused(
        R2cclError,
        "input_split_sizes",
        lambda: dist.all_to_all_single(torch.zeros(ranks), one, [1] * ranks, [2] * ranks),
    )
    if ranks > 1:
        refused(
            R2cclError,
            "not divisible",
            lambda: dist.all_to_all_single(torch.zeros(ranks + 1), torch.ones(ranks + 1)),
        )
    refused(R2cclError, "outputs", lambda: dist.all_gather([torch.ones(3)] * ranks, one[:1]))
    refused(
        R2cclError,
        "input: shape",
        lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(2 * ranks + 1)),
    )
    group = dist.group.WORLD
    assert group is not None
    refused(R2cclError, "resolve_conj", lambda: group.allreduce([torch.tensor([1j]).conj()]))
    refused(R2cclError, "must be 1, because", lambda: group.allreduce([one, one]))
    refused(
        R2cclError,
        "dtypes differ",
        lambda: group.alltoall(some, [*some[1:], torch.ones(1, dtype=torch.int32)]),
    )
    refused(R2cclError, "peer", lambda: group.send([one], me, 0))
    dist.all_reduce(one)
    same(one, torch.full((ranks,), float(ranks)))


def objects_in_steps(me: int, ranks: int) -> None:
    """Objects within compared steps part no ranks; a broadcast that a rank leaves out does."""
    group: Any = dist.group.WORLD

    def exchange(number: int) -> None:
        objects: list[Any] = [number, "x" * number] if me == 0 else [None, None]
        dist.broadcast_object_list(objects, src=0)
        assert objects == [number, "x" * number]
        dist.all_gather_object([None] * ranks, me)

    def step(number: int, *, parts: bool) -> None:
        with group.communicator.step(number):
            exchange(number)
            if me != 1 or not parts:
                dist.broadcast(torch.ones(4), src=0)

    for number in range(1, 4):
        step(number, parts=False)
    refused(OrderMismatchError, "step 4", lambda: step(4, parts=True))


def late(me: int, ranks: int) -> None:
    """A rank does not join a collective: the other ranks time out, in wait() and in the call."""
    if me == 0:
        hear("late", range(1, ranks))
        refused_soon("timeout", lambda: dist.all_reduce(torch.ones(1)))
        return
    group = dist.new_group(list(range(1, ranks)), use_local_synchronization=True)
    began = time.monotonic()
    if me == 1:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        refused(AbortedError, "timeout", lambda: work.wait(timedelta(seconds=1)))
    else:
        refused(AbortedError, "timeout", lambda: dist.all_reduce(torch.ones(1)))
    tell("late", me)
    if me == 1:  # the abort may reach the other ranks soon after the begin of their call
        assert time.monotonic() - began > 0.9
    dist.all_reduce(torch.ones(1), group=group)  # other groups still work


def reduce_to_the_end(group: Any = None) -> None:
    """Reduces and waits for the result; a GPU's collective is only enqueued in a stream."""
    dist.all_reduce(torch.ones(1), group=group)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        check_all()


def overdue(me: int, ranks: int) -> None:
    """The group's timeout ends collectives on the calling thread."""
    words = f"within {OVERDUE_S} s (timeout)"
    if me == 0:
        hear("overdue", range(1, ranks))
        refused_soon(words, reduce_to_the_end)
    else:
        refused(AbortedError, words, reduce_to_the_end)
    tell("overdue", me)


def overdue_later(me: int, ranks: int) -> None:
    dist.all_reduce(torch.ones(1))
    overdue(me, ranks)


def death(me: int, ranks: int) -> None:
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    if me == 0:
        os._exit(0)
    refused(PeerLostError, "rank 0", reduce_to_the_end)
    refused(PeerLostError, "rank 0", lambda: dist.barrier())


def nothing_void_is_sent(me: int, ranks: int) -> None:
    """Results computed without a lost peer's part are not sent, over any group."""
    pair = dist.new_group([0, 1])
    ones = torch.ones(3)
    if me < 2:
        dist.all_reduce(ones, group=pair)
    dist.barrier()
    if me == 0:
        refused(AbortedError, "was aborted", lambda: reduce_to_the_end(pair))
        sent = dist.isend(ones, 2)
        assert sent is not None
        refused(AbortedError, "was aborted", sent.wait)
        tell("refused", me)
    elif me == 1:
        pair.abort()
        hear("refused", [0, 2])  # an early exit would look like a closed peer
    else:
        refused(AbortedError, "was aborted", lambda: dist.recv(torch.zeros(3), 0))
        tell("refused", me)


def unmatched(me: int, ranks: int) -> None:
    """A receive without a matching send does not keep a group from ending."""
    work = dist.irecv(torch.ones(1), (me + 1) % ranks)
    assert work is not None
    dist.barrier()
    dist.destroy_process_group()
    # The own group or the peer's group ends first; both errors are right.
    with pytest.raises((AbortedError, PeerClosedError), match=r"shut down|has closed"):
        work.wait()


def forgotten(me: int, ranks: int) -> None:
    """A receive without a matching send does not keep a process from exiting."""
    for _ in range(2):
        dist.irecv(torch.ones(1), (me + 1) % ranks)
    dist.barrier()


def forked(me: int, ranks: int) -> None:
    """A forked child cannot use the group, and the group works on."""
    given = [torch.ones(4) for _ in range(ranks)]
    own = torch.ones(4)
    peer = (me + 1) % ranks
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(given[0]),
        "asynchronous": lambda: dist.all_reduce(given[0], async_op=True),
        "broadcast": lambda: dist.broadcast(given[0], 0),
        "all_gather": lambda: dist.all_gather(given, own),
        "barrier": dist.barrier,
        "send": lambda: dist.send(given[0], peer),
        "recv": lambda: dist.recv(given[0], peer),
        "shutdown": lambda: dist.group.WORLD.shutdown(),
    }
    dist.all_reduce(given[0])
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        told = "the child failed"
        try:
            wrong = []
            for name, call in calls.items():
                try:
                    refused(InvalidArgumentError, "before a fork", call)
                except BaseException as error:  # noqa: BLE001  told to the parent
                    wrong.append(f"{name}: {error!r}")
            told = "; ".join(wrong) or "all refused"
        finally:
            os.write(writing, told.encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    assert told == "all refused", told
    after = torch.full((4,), float(me))
    dist.all_reduce(after)
    same(after, torch.full((4,), float(sum(range(ranks)))))


NOT_DESTROYED = {
    "unmatched",
    "forgotten",
    "death",
    "death_in_training",
    "late",
    "overdue",
    "overdue_later",
    "aborted",
    "again",
    "nothing_void_is_sent",
}


def rank_main(rank: int, case: str, ranks: int, folder: str, on_gpu: bool) -> None:
    os.environ["STORE_FOLDER"] = folder
    if on_gpu and torch.cuda.is_available():
        torch.set_default_device("cuda")
    elif on_gpu:
        landing.GPUS.add("cpu")
    timeout = timedelta(seconds=OVERDUE_S if case.startswith("overdue") else 60)
    dist.init_process_group(
        r2serve.engines.torch.BACKEND,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timeout,
    )
    assert type(dist.group.WORLD).__name__ == "R2cclGroup"
    globals()[case](rank, ranks)
    if case not in NOT_DESTROYED:
        dist.destroy_process_group()


def main(case: str, ranks: int, *, on_gpu: bool) -> int:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        started = [
            context.Process(target=rank_main, args=(rank, case, ranks, folder, on_gpu))
            for rank in range(ranks)
        ]
        for process in started:
            process.start()
        for process in started:
            process.join()
    return max(process.exitcode != 0 for process in started)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), on_gpu=sys.argv[3:] == ["gpu"]))
