"""A script: starts the ranks of a job as processes with vLLM's groups, and checks the results.

    python vllm_ranks.py CASE NODE,NODE,...     a node name for each rank, or "per-rank" for each

CASE is the name of a function below; every rank runs this function. The exit status is 0 if every
rank returned; else tracebacks are shown. A single process imports vLLM; the ranks are forks.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator
from vllm.ir.ops import fused_add_rms_norm
from vllm.platforms import current_platform
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from r2serve.engines import flag
from r2serve.engines.torch import landing
from r2serve.engines.vllm import ending, relies_on
from r2serve.engines.vllm.platform import make_platform
from r2serve.engines.vllm.worker import trusted
from r2serve.errors import OrderMismatchError, R2cclError

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64)
SHAPES = ((6,), (4, 6), (2, 4, 6), (0, 4), (4, 0))


def numbers(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Returns the input of a rank: small integers, so that sums are exact in every dtype."""
    count = torch.Size(shape).numel()
    return (torch.arange(count).reshape(shape) % 13 + rank).to(dtype)


def everyone(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    return [numbers(rank, shape, dtype) for rank in range(world())]


def world() -> int:
    return parallel_state.get_tp_group().world_size


def same(got: torch.Tensor | None, expected: torch.Tensor) -> None:
    assert got is not None
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape, (got.shape, expected.shape)
    assert torch.equal(got, expected), (got, expected)


def inputs(rank: int) -> Iterator[torch.Tensor]:
    """Every dtype and shape, and a tensor that is not contiguous."""
    for dtype in DTYPES:
        for shape in SHAPES:
            yield numbers(rank, shape, dtype)
    yield numbers(rank, (4, 6), torch.float32).t()


def the_sum(like: torch.Tensor, rank: int) -> torch.Tensor:
    """Returns the sum over the ranks, for tensors that grow by 1 from rank to rank."""
    ranks = world()
    return like * ranks + (sum(range(ranks)) - rank * ranks)


def of_rank(like: torch.Tensor, mine: int, other: int) -> torch.Tensor:
    return like + (other - mine)


def collectives(rank: int) -> None:
    """Every collective of a group that spans nodes, compared with torch in a single process."""
    comm = parallel_state.get_tp_group().device_communicator
    assert type(comm).__name__ == "SpanningCpuCommunicator"
    assert isinstance(comm, CpuCommunicator)
    every_collective(rank)
    tensor_dicts(parallel_state.get_tp_group(), rank)


def gpu_collectives(rank: int) -> None:
    """Every collective on the communicator for GPUs, with the fake driver."""
    comm = parallel_state.get_tp_group().device_communicator
    assert type(comm).__name__ == "SpanningCudaCommunicator"
    assert isinstance(comm, CudaCommunicator)
    every_collective(rank)


def every_collective(rank: int) -> None:
    group = parallel_state.get_tp_group()
    comm = group.device_communicator
    assert group.use_custom_op_call
    for tensor in inputs(rank):
        before = tensor.clone()
        same(group.all_reduce(tensor), the_sum(tensor, rank))
        same(tensor, before)
        theirs = [of_rank(tensor, rank, other) for other in range(world())]
        for dim in range(-tensor.dim(), tensor.dim()):
            same(group.all_gather(tensor, dim), torch.cat(theirs, dim))
            gathered = group.gather(tensor, dst=1, dim=dim)
            if rank == 1:
                same(gathered, torch.cat(theirs, dim))
            else:
                assert gathered is None
        wide = torch.cat([tensor] * world())
        for dim in range(wide.dim()):
            turned = wide.movedim(0, dim)
            mine = the_sum(turned, rank).chunk(world(), dim)[rank] if tensor.numel() else None
            if mine is not None:
                same(group.reduce_scatter(turned, dim), mine)
        uneven_rows(comm, rank, tensor)
        same(comm.broadcast(tensor.clone(), src=1), of_rank(tensor, rank, 1))
        around_the_ring(group, rank, tensor)
    carried_as_bytes(comm, rank)
    compiled(rank)


def uneven_rows(comm: Any, rank: int, tensor: torch.Tensor) -> None:
    """all_gatherv and reduce_scatterv, with a rank without rows."""
    sizes = [(r + 1) % world() for r in range(world())]
    if not tensor.numel():
        return
    row = tensor[:1]
    rows = [torch.cat([of_rank(row, rank, r)] * n) if n else row[:0] for r, n in enumerate(sizes)]
    expected = torch.cat(rows)
    same(comm.all_gatherv(rows[rank], 0, sizes), expected)
    one, two = comm.all_gatherv([rows[rank], rows[rank] * 2], 0, sizes)
    same(one, expected)
    same(two, expected * 2)
    same(comm.all_gatherv(row), torch.cat([of_rank(row, rank, r) for r in range(world())]))
    whole = torch.cat([row] * sum(sizes))
    share = the_sum(whole, rank).split(sizes)[rank]
    same(comm.reduce_scatterv(whole, 0, sizes), share)
    same(comm.reduce_scatterv_into_output(whole, torch.empty_like(share), 0, sizes), share)


def around_the_ring(group: Any, rank: int, tensor: torch.Tensor) -> None:
    group.send(tensor)
    received = group.recv(tensor.shape, tensor.dtype)
    same(received, of_rank(tensor, rank, (rank - 1) % world()))


def carried_as_bytes(comm: Any, rank: int) -> None:
    """dtypes unknown to r2ccl can be moved, but not reduced."""
    for dtype in (torch.float8_e4m3fn, torch.uint16, torch.complex64):
        theirs = [torch.tensor([[1, 2], [3, r]]).to(dtype) for r in range(world())]
        same_bytes(comm.all_gather(theirs[rank], 0), torch.cat(theirs))
        same_bytes(comm.broadcast(theirs[rank].clone(), src=1), theirs[1])
        sizes = [2, 2] + [0] * (world() - 2)
        mine = theirs[rank][: sizes[rank]]
        same_bytes(comm.all_gatherv(mine, 0, sizes), torch.cat(theirs[:2]))


def same_bytes(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype
    same(got.view(torch.uint8), expected.view(torch.uint8))


def tensor_dicts(group: Any, rank: int) -> None:
    """The tensor dictionaries exchanged by pipeline stages."""
    sent = {
        "hidden": numbers(3, (4, 6), torch.bfloat16).t(),
        "empty": torch.empty(0, 6),
        "note": ("text", 7),
        "scales": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
    }
    if rank == 0:
        group.send_tensor_dict(sent, dst=1)
    elif rank == 1:
        got = group.recv_tensor_dict(src=0)
        assert list(got) == list(sent)
        assert got["note"] == sent["note"]
        for key in ("hidden", "empty"):
            same(got[key], sent[key])
        same_bytes(got["scales"], sent["scales"])


def dictionaries_in_steps(rank: int) -> None:
    """Dictionaries and objects within compared steps part no ranks; a call left out does."""
    communicator = parallel_state.get_tp_group().device_communicator.r2ccl
    for number in range(1, 4):
        with communicator.step(number, f"requests {number}"):
            dictionaries_and_objects(rank, number)
    try:
        with communicator.step(4, "requests 4"):
            dictionaries_and_objects(rank, 4)
            communicator.barrier()  # no rank is in a call of vLLM, whose error would end the rank
            if rank != 1:
                communicator.broadcast(torch.ones(4), 0)
    except OrderMismatchError as error:
        logging.error("parted: %s", error)


def dictionaries_and_objects(rank: int, number: int) -> None:
    """A part of a step: calls of all ranks, of a root, and of ranks 0 and 1 alone."""
    group = parallel_state.get_tp_group()
    same(group.all_reduce(torch.ones(4)), torch.full((4,), float(world())))
    objects: list[Any] = [number, {"a": "b"}] if rank == 0 else [None, None]
    assert group.broadcast_object_list(objects) == [number, {"a": "b"}]
    sent: dict[str, Any] = {"hidden": torch.full((4, 6), float(number)), "note": number}
    got = group.broadcast_tensor_dict(sent if rank == 0 else None)
    assert got["note"] == number
    same(got["hidden"], sent["hidden"])
    tensor_dicts(group, rank)


def compiled(rank: int) -> None:
    """Dynamo sees a single opaque op: a full graph is possible, and the input stays unchanged."""
    group = parallel_state.get_tp_group()

    def layer(x: torch.Tensor) -> torch.Tensor:
        return group.all_reduce(x) + x

    tensor = numbers(rank, (4, 6), torch.float32)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    same(run(tensor), the_sum(tensor, rank) + tensor)


def one_node(rank: int) -> None:
    """A group inside one node uses only vLLM's methods."""
    group = parallel_state.get_tp_group()
    comm = group.device_communicator
    assert type(comm).__name__ == "R2cclCpuCommunicator"
    ours = [each for each in type(comm).__mro__ if each.__module__.startswith("r2serve.")]
    added = {name for each in ours for name in vars(each) if not name.startswith("__")}
    replaced = {name for name in added if hasattr(CpuCommunicator, name)}
    assert not replaced, f"stands between vLLM and its own collectives: {replaced}"
    assert not [name for name in vars(comm) if callable(getattr(CpuCommunicator, name, None))]
    # vLLM's kernels for CPUs without AVX-512 have no shared memory collectives.
    shared_memory = hasattr(torch.ops._C, "init_shm_manager")
    own = "_CPUSHMDistributed" if shared_memory else torch.distributed.__name__
    assert getattr(comm.dist_module, "__name__", type(comm.dist_module).__name__) == own
    assert not group.use_custom_op_call
    tensor = numbers(rank, (4, 6), torch.float32)
    same(group.all_reduce(tensor.clone()), the_sum(tensor, rank))


def error_ends_every_rank(rank: int) -> None:
    """A rank ends after a failed collective; the other ranks get a typed error and end, too."""
    ending.DELIVERY_S = 5.0  # a starved rank logs its errors late
    group = parallel_state.get_tp_group()
    group.all_reduce(torch.ones(4))
    started = time.monotonic()
    try:
        group.all_reduce(torch.ones(4, dtype=torch.complex64 if rank == 1 else torch.float32))
    except (R2cclError, TypeError) as error:
        logging.error("rank %d after %.1f s: %r", rank, time.monotonic() - started, error)
    time.sleep(60)  # vLLM's workers wait for work like this, except the output rank
    logging.error("rank %d was left waiting", rank)


def gpu_graph(rank: int) -> None:
    """A captured graph is replayed while rails are cut and healed: every result is right."""
    comm = parallel_state.get_tp_group().device_communicator
    r2ccl = comm.r2ccl
    cuda = Cuda()
    stream = cuda.new("cuStreamCreate", 0)
    r2ccl._core._stream = lambda: stream.value  # replaces torch's current stream
    source = torch.zeros(5000)
    cuda.call("cuStreamBeginCapture_v2", stream, 0)
    total = comm.all_reduce(source)
    everything = r2ccl.all_gather(total)
    graph = cuda.new("cuStreamEndCapture", stream, handle_last=True)
    executable = cuda.new("cuGraphInstantiateWithFlags", graph, ctypes.c_ulonglong(0))
    slowest = 0.0
    for turn in range(REPLAYS):
        if rank == 0 and turn % 50 == 25:
            r2ccl.inject(turn // 50 % 2, "carrier_loss")
        if rank == 0 and turn % 50 == 45:
            r2ccl.inject(turn // 50 % 2, "heal")
        source.copy_(torch.arange(5000.0) + rank + turn)
        began = time.monotonic()
        cuda.call("cuGraphLaunch", executable, stream)
        cuda.call("cuStreamSynchronize", stream)
        slowest = max(slowest, time.monotonic() - began)
        r2ccl.check()
        same(total, world() * (torch.arange(5000.0) + turn) + sum(range(world())))
        for other in range(world()):
            same(everything[other], total)
    downs = [event for event in r2ccl.events() if "->DOWN" in event.text]
    assert rank != 0 or downs, "no rail was lost"
    logging.info("%d replays, %d losses, slowest %.3f s", REPLAYS, len(downs), slowest)


def fused(rank: int) -> None:
    """The fused operation gives the same result as the separate operations."""
    import r2serve.engines.vllm.fusion  # noqa: F401  it registers the operation

    group = parallel_state.get_tp_group()
    for dtype in (torch.bfloat16, torch.float32):
        for shape in ((1, 64), (7, 64), (9000, 64)):  # the last shape is too large for slots
            generator = torch.Generator().manual_seed(rank)
            tensor = torch.randn(shape, generator=generator).to(dtype)
            residual = torch.randn(shape, generator=generator.manual_seed(9)).to(dtype)
            weight = torch.randn(shape[-1:], generator=generator).to(dtype)
            given = [each.clone() for each in (tensor, residual, weight)]
            normed, new = torch.ops.r2serve.all_reduce_add_rms_norm(
                tensor, residual, weight, 1e-5, group.unique_name
            )
            total = group.all_reduce(tensor)
            expected, expected_new = fused_add_rms_norm(total, residual, weight, 1e-5)
            same(new, expected_new)
            torch.testing.assert_close(normed, expected)
            for before, after in zip(given, (tensor, residual, weight), strict=True):
                same(after, before)


gpu_fused = fused

REPLAYS = 400


class Cuda:
    """Calls the communicator's driver, as torch would."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["R2CCL_CUDA_LIBRARY"])

    def call(self, name: str, *arguments: Any) -> None:
        assert getattr(self._library, name)(*arguments) == 0, name

    def new(self, name: str, *arguments: Any, handle_last: bool = False) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        where = ctypes.byref(made)
        self.call(name, *((*arguments, where) if handle_last else (where, *arguments)))
        return made


def gpu_loss(rank: int) -> None:
    """A lost peer: outputs computed by the GPU since the loss are withheld, and the worker ends."""
    ending.DELIVERY_S = 5.0  # a starved rank logs its errors late
    group = parallel_state.get_tp_group()
    group.all_reduce(torch.ones(4))
    if rank == 1:
        dist.recv(torch.zeros(1), 0, group=group.cpu_group)  # rank 0 has the whole first result
        time.sleep(5.0)  # until rank 0 is in its next call
        os._exit(0)
    dist.send(torch.ones(1), 1, group=group.cpu_group)
    total = group.all_reduce(torch.ones(4))  # enqueued in the stream; the loss is not yet known
    tokens = ModelRunnerOutput(["a"], {"a": 0})
    assert trusted(None) is None
    for output in (tokens, Later(tokens)):
        try:
            got = trusted(output)
            got.get_output()
        except R2cclError as error:
            logging.error("not given out: %s: %s", type(error).__name__, error)
        else:
            logging.error("garbage: %s of %s", got, total)
    time.sleep(60)
    logging.error("rank %d was left waiting", rank)


class Later(AsyncModelRunnerOutput):
    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def get_output(self) -> ModelRunnerOutput:
        return self._output


def gpu_stages(rank: int) -> None:
    """Tensors of pipeline stages, sent over the device group, survive the loss of a rail."""
    group = parallel_state.get_pp_group()
    communicator = group.device_group.communicator
    # vLLM sends GPU tensors over the device group; the host tensors of this test must go there,
    # too.
    own, group.cpu_group = group.cpu_group, group.device_group
    sibling = group.make_sibling_device_group()
    for turn in range(90):
        if rank == 0 and turn % 15 == 5:
            communicator.inject(turn // 30 % 2, "carrier_loss" if turn % 30 == 5 else "heal")
        hidden = numbers(turn, (64, 128), torch.bfloat16)
        if rank == 0:
            group.send_tensor_dict({"hidden": hidden, "turn": turn})
        else:
            got = group.recv_tensor_dict()
            assert got["turn"] == turn
            same(got["hidden"], hidden)
        tokens = torch.full((8,), turn if group.is_last_rank else -1)
        dist.broadcast(tokens, src=group.last_rank, group=sibling, async_op=True).wait()
        same(tokens, torch.full((8,), turn))
        counts = torch.tensor([rank + 1, turn], dtype=torch.int32)
        dist.all_reduce(counts, group=group.device_group)
        same(counts, torch.tensor([3, 2 * turn], dtype=torch.int32))
    group.cpu_group = own
    if rank == 0:
        lost = [event for event in communicator.events() if "->DOWN" in event.text]
        logging.info("90 steps of two stages, rails went DOWN %d times", len(lost))
        assert lost


def device_backend() -> str:
    """Returns the device group backend chosen by the CUDA platform."""

    class Cuda(CpuPlatform):  # type: ignore[misc]
        device_type = "cuda"
        dist_backend = "nccl"

    os.environ[flag.SPANS_VARIABLE] = "1"
    landing.GPUS.add("cpu")
    return str(make_platform(Cuda, "R2cclCudaPlatform")().dist_backend)


def rank_main(rank: int, case: str, nodes: list[str], store: str) -> None:
    os.environ["R2CCL_NODE"] = nodes[rank]
    os.environ["VLLM_DIST_IDENT"] = os.path.basename(os.path.dirname(store))
    logging.basicConfig(level=logging.INFO, format=f"rank {rank}: %(message)s", force=True)
    if case.startswith("gpu_"):  # like the CUDA platform
        ours = relies_on.COMMUNICATORS[named(CudaCommunicator)]
        relies_on.COMMUNICATORS[named(CpuCommunicator)] = ours
    stages = case == "gpu_stages"
    backend = device_backend() if stages else "gloo"
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(
            len(nodes), rank, f"file://{store}", rank, backend
        )
        parallel_state.initialize_model_parallel(*((1, len(nodes)) if stages else (len(nodes), 1)))
        globals()[case](rank)
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def named(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def main(case: str, nodes: list[str]) -> int:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)  # a fork of a process with OpenMP threads would hang in these threads
    current_platform.import_kernels()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=rank_main, args=(rank, case, nodes, f"{folder}/store"))
            for rank in range(len(nodes))
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        # multiprocessing skips the destructors that unlink these segments.
        for segment in Path("/dev/shm").glob(f"{os.path.basename(folder)}-*"):
            segment.unlink()
    return max(rank.exitcode != 0 for rank in ranks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2].split(",")))
