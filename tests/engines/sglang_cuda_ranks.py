"""A script: a group of SGLang with a GPU on each of two nodes, on the fake CUDA driver.

    python sglang_cuda_ranks.py PORT

The class, the coordinator and their calls are those of the installed SGLang with the plugin. Only
the driver, torch.cuda and SGLang's choice of the device are replaced; tensors are on the CPU. Each
rank prints `rank R passed CHECK`. A single process imports SGLang; the ranks are forks.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch_on_driver

torch_on_driver.install()  # before SGLang, because SGLang imports functions of torch.cuda by name

from sglang.srt.plugins import load_plugins  # noqa: E402

load_plugins()

from sglang.srt.distributed import parallel_state  # noqa: E402

import r2serve.device  # noqa: E402

RANKS = 2
REPLAYS = 200
CUT_EVERY = 50
NUMBERS = 5000
GRACE_S = 10.0


def same(found: torch.Tensor, expected: list[Any]) -> None:
    assert found.tolist() == expected, f"{found.tolist()} is not {expected}"


def collectives(group: Any, rank: int) -> None:
    """SGLang's own calls, which end in our class."""
    made = group.pynccl_comm
    assert type(made).__name__ == "SpanningCommunicator", type(made)
    total = torch.tensor([1.0, 2.0]) + rank
    group._all_reduce_in_place(total)
    same(total, [3.0, 5.0])
    given = torch.tensor([1.0, 2.0]) + rank
    same(made.outplace_all_reduce(given), [3.0, 5.0])
    same(given, [1.0 + rank, 2.0 + rank])
    largest = torch.tensor([1.0, -rank])
    made.all_reduce(largest, dist.ReduceOp.MAX)
    same(largest, [1.0, 0.0])
    gathered = torch.empty(4)
    group.all_gather_into_tensor(gathered, torch.full((2,), rank + 1.0))
    same(gathered, [1.0, 1.0, 2.0, 2.0])
    sizes = [1, 3]
    [rows] = group.all_gatherv(torch.full((sizes[rank], 2), rank + 1.0), sizes=sizes)
    same(rows, [[1.0, 1.0]] + [[2.0, 2.0]] * 3)
    own = torch.empty(2)
    group.reduce_scatter_tensor(own, torch.arange(4.0) + rank)
    same(own, [[1.0, 3.0], [5.0, 7.0]][rank])
    part = group.reduce_scatterv(torch.arange(4.0) + rank, sizes=sizes)
    same(part, [[1.0], [3.0, 5.0, 7.0]][rank])
    same(group.broadcast(torch.tensor([float(rank)]), 1), [1.0])
    swapped = torch.empty(4)
    made.all_to_all_single(swapped, torch.arange(4.0) + 10 * rank)
    same(swapped, [[0.0, 1.0, 10.0, 11.0], [2.0, 3.0, 12.0, 13.0]][rank])
    if rank == 0:
        group.send(torch.tensor([7.0, 8.0]), 1)
    else:
        same(group.recv(torch.Size([2]), torch.float32, 0), [7.0, 8.0])
    made.r2ccl.check()


def outside(group: Any, rank: int) -> None:
    """Traffic of SGLang that goes by torch.distributed, on both torch groups."""
    assert dist.get_backend(group.device_group) == dist.get_backend(group.cpu_group) == "r2ccl"
    assert group.broadcast_object({"of": 0} if rank == 0 else None) == {"of": 0}
    tokens = torch.tensor([5 - rank])
    dist.all_reduce(tokens, dist.ReduceOp.MIN, group=group.device_group)
    same(tokens, [4])
    group.barrier()


def graph(group: Any, rank: int) -> None:
    """A captured graph is replayed while rails are cut and healed: every result is right."""
    made = group.pynccl_comm
    source, halves = torch.zeros(NUMBERS), torch.zeros(NUMBERS // RANKS)
    gathered = torch.zeros(NUMBERS)
    captured, stream = torch_on_driver.Graph(), torch_on_driver.Stream()
    with torch_on_driver.capture(captured, stream=stream):
        total = made.outplace_all_reduce(source)
        group.reduce_scatter_tensor(halves, total)
        group.all_gather_into_tensor(gathered, halves)
        group._all_reduce_in_place(halves)
    with torch_on_driver.entered(stream):
        for turn in range(REPLAYS):
            if rank == 0 and turn % CUT_EVERY == CUT_EVERY // 2:
                made.r2ccl.inject(turn // CUT_EVERY % 2, "carrier_loss")
            if rank == 0 and turn % CUT_EVERY == CUT_EVERY - 5:
                made.r2ccl.inject(turn // CUT_EVERY % 2, "heal")
            source.copy_(torch.arange(float(NUMBERS)) + rank + turn)
            captured.replay()
            stream.synchronize()
            made.r2ccl.check()
            expected = 2 * (torch.arange(float(NUMBERS)) + turn) + 1
            assert torch.equal(total, expected)
            assert torch.equal(gathered, RANKS * expected)
            first, second = (RANKS * expected).chunk(RANKS)
            assert torch.equal(halves, first + second)
    downs = [event.text for event in made.r2ccl.events() if "->DOWN" in event.text]
    assert rank != 0 or downs, "no rail was lost"


def rank_main(rank: int, port: int) -> None:
    os.environ["R2CCL_NODE"] = f"node{rank}"
    # A DeviceCommunicator of host tensors would otherwise use only the default stream.
    r2serve.device._current_stream = lambda _: lambda: torch.cuda.current_stream().cuda_stream
    parallel_state._group_coordinator_device = lambda local_rank: torch.device("cuda", 0)
    with torch_on_driver.OnTheHost():
        backend = parallel_state.get_default_distributed_backend("cuda")
        parallel_state.init_distributed_environment(
            world_size=RANKS,
            rank=rank,
            distributed_init_method=f"tcp://127.0.0.1:{port}",
            local_rank=0,
            backend=backend,
        )
        group = parallel_state.init_model_parallel_group(
            [list(range(RANKS))], 0, backend, group_name="tp", use_custom_allreduce=False
        )
        for check in (collectives, outside, graph):
            check(group, rank)
            sys.stdout.write(f"rank {rank} passed {check.__name__}\n")
            sys.stdout.flush()
        dist.barrier()


def main(port: int) -> int:
    torch.set_num_threads(1)  # a fork would hang in OpenMP threads
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=rank_main, args=(rank, port)) for rank in range(RANKS)]
    for each in ranks:
        each.start()
    while any(each.is_alive() for each in ranks) and all(
        each.exitcode in (None, 0) for each in ranks
    ):
        time.sleep(0.1)
    for each in ranks:  # a rank waits long for a stopped peer
        each.join(GRACE_S)
        each.kill()
        each.join()
    return max(each.exitcode != 0 for each in ranks)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
