"""A script: vLLM's GPU workers, one on each of two nodes, on the fake CUDA driver.

    python vllm_cuda_ranks.py MODEL PORT

Each rank runs the steps of :data:`STEPS` in order and prints `rank R reached STEP`. If a step
fails, the rank prints `rank R stopped at STEP: ERROR` and ends with status 1, and so does the
script. A single process imports vLLM; the ranks are forks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import sys
import time
import traceback
from collections import deque
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch_on_driver
import vllm_without_kernels

torch_on_driver.install()  # before vLLM, because vLLM imports functions of torch.cuda by name
_STAND_INS = vllm_without_kernels.install()

from vllm.platforms import current_platform  # noqa: E402

_FOUND = type(current_platform).__mro__
# Tensors are on the host, so vLLM's operations are registered for the host.
type(current_platform).dispatch_key = "CPU"

import vllm_ranks  # noqa: E402
from vllm import ModelRegistry, SamplingParams  # noqa: E402
from vllm.compilation.cuda_graph import CUDAGraphWrapper  # noqa: E402
from vllm.compilation.monitor import set_cudagraph_capturing_enabled  # noqa: E402
from vllm.config import CUDAGraphMode, set_current_vllm_config  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.forward_context import BatchDescriptor, set_forward_context  # noqa: E402
from vllm.utils.import_utils import resolve_obj_by_qualname  # noqa: E402

import r2serve.device  # noqa: E402

CACHE_BYTES = 16 << 20
PROMPT = list(range(5, 25))
TOKENS = 3
STEPS_UNDER_WAY = 2
"""Length of the engine core's queue under asynchronous scheduling."""
OVERLAPPED = "R2SERVE_TEST_OVERLAPPED"
"""Environment variable; set: the step `overlapped` runs, too."""
REPLAYS = 20
GRACE_S = 10.0
RANK_LIMIT_S = 900.0  # shorter than the test's limit for the script


def platform(state: Any) -> None:
    """vLLM's NVML detection and the plugin's entry point pick the class."""
    names = [cls.__name__ for cls in _FOUND[:3]]
    assert names == ["R2cclCudaPlatform", "NvmlCudaPlatform", "CudaPlatformBase"], names
    assert current_platform.is_cuda()
    assert tuple(current_platform.get_device_capability()) == (9, 0)


def configuration(state: Any) -> None:
    """The engine configuration is built as in `vllm serve`, with r2serve's checks."""
    arguments = EngineArgs(
        model=state.model,
        tensor_parallel_size=2,
        nnodes=2,
        node_rank=state.rank,
        master_addr="127.0.0.1",
        master_port=state.port,
        distributed_executor_backend="mp",
        dtype="float32",
        max_model_len=256,
        max_num_batched_tokens=256,
        max_num_seqs=4,
        kv_cache_memory_bytes=CACHE_BYTES,
        enable_prefix_caching=False,
        enforce_eager=True,
        attention_backend="TRITON_ATTN",
        compilation_config={"custom_ops": ["none"]},
        kernel_config={
            "ir_op_priority": {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]}
        },
    )
    state.config = arguments.create_engine_config(headless=state.rank > 0)
    assert state.config.parallel_config.worker_cls.endswith("R2cclGpuWorker")
    assert state.config.additional_config["r2serve"]["distributed_backend"] == "r2ccl"
    assert current_platform.dist_backend == "r2ccl"


def worker(state: Any) -> None:
    made = resolve_obj_by_qualname(state.config.parallel_config.worker_cls)
    assert [cls.__name__ for cls in made.__mro__[:2]] == ["R2cclGpuWorker", "Worker"]
    state.worker = made(
        state.config,
        local_rank=0,
        rank=state.rank,
        distributed_init_method="env://",  # nnodes > 1: vLLM uses the master's address
        is_driver_worker=state.rank == 0,
    )


def device(state: Any) -> None:
    """vLLM's init_device: the distributed environment, all groups, the model runner."""
    state.worker.init_device()
    group = parallel_state.get_tp_group()
    assert str(group.device) == "cuda:0"
    assert type(group.device_communicator).__name__ == "SpanningCudaCommunicator"
    assert group.use_custom_op_call
    assert dist.get_backend(group.device_group) == "r2ccl"
    assert dist.get_backend(group.cpu_group) == "gloo"
    assert parallel_state.get_node_count() == 2


def collectives(state: Any) -> None:
    """Every collective of the group works, directly and through torch.ops.vllm."""
    vllm_ranks.every_collective(state.rank)
    group = parallel_state.get_tp_group()
    tensor = vllm_ranks.numbers(state.rank, (4, 6), torch.bfloat16)
    through = torch.ops.vllm.all_reduce(tensor, group_name=group.unique_name)
    vllm_ranks.same(through, vllm_ranks.the_sum(tensor, state.rank))
    vllm_ranks.same(
        group.broadcast(tensor.clone(), src=1), vllm_ranks.of_rank(tensor, state.rank, 1)
    )


def device_group(state: Any) -> None:
    """The torch.distributed backend carries traffic outside the communicator."""
    group = parallel_state.get_tp_group()
    counts = torch.tensor([state.rank + 1, 5])
    dist.all_reduce(counts, group=group.device_group)
    vllm_ranks.same(counts, torch.tensor([3, 10]))
    tokens = torch.full((8,), 7 if state.rank == 1 else -1)
    sibling = group.make_sibling_device_group()
    dist.broadcast(tokens, src=1, group=sibling)
    vllm_ranks.same(tokens, torch.full((8,), 7))


def graph(state: Any) -> None:
    """vLLM's wrapper captures an all-reduce; rails fail while the graph is replayed."""
    group = parallel_state.get_tp_group()
    r2ccl = group.device_communicator.r2ccl
    source = torch.zeros(5000)
    wrapped = CUDAGraphWrapper(group.all_reduce, state.config, CUDAGraphMode.FULL)
    forward = {
        "cudagraph_runtime_mode": CUDAGraphMode.FULL,
        "batch_descriptor": BatchDescriptor(num_tokens=1),
    }
    set_cudagraph_capturing_enabled(True)
    with parallel_state.graph_capture(device=state.worker.device) as context:
        with set_forward_context(None, state.config, **forward):
            wrapped(source)
        [entry] = wrapped.concrete_cudagraph_entries.values()
        assert isinstance(entry.cudagraph, torch_on_driver.Graph)
        for turn in range(REPLAYS):
            if state.rank == 0 and turn % 10 == 5:
                r2ccl.inject(turn // 10 % 2, "carrier_loss")
            if state.rank == 0 and turn % 10 == 9:
                r2ccl.inject(turn // 10 % 2, "heal")
            source.copy_(torch.arange(5000.0) + state.rank + turn)
            with set_forward_context(None, state.config, **forward):
                total = wrapped(source)
            context.stream.synchronize()
            r2ccl.check()
            vllm_ranks.same(total, 2 * (torch.arange(5000.0) + turn) + 1)
    set_cudagraph_capturing_enabled(False)
    if state.rank == 0:
        assert rails_lost(r2ccl), "no rail was lost"


def model(state: Any) -> None:
    """Each rank loads its half of the weights."""
    state.worker.load_model()
    for module in state.worker.model_runner.model.modules():
        if hasattr(module, "use_fused_embedding"):
            module.use_fused_embedding = False  # True would need a kernel of vLLM


def cache(state: Any) -> None:
    """The engine core plans and creates the KV cache over an executor with a single worker."""
    from vllm.v1.engine.core import EngineCore

    here = state.worker
    executor = SimpleNamespace(
        get_kv_cache_specs=lambda: [here.get_kv_cache_spec()],
        get_supported_kv_cache_layouts=lambda: [here.get_supported_kv_cache_layouts()],
        set_kv_cache_layout=here.set_kv_cache_layout,
        determine_available_memory=lambda: [CACHE_BYTES],
        initialize_from_config=lambda configs: here.initialize_from_config(configs[0]),
        compile_or_warm_up_model=lambda: None,
    )
    core = SimpleNamespace(model_executor=executor)
    state.cache = EngineCore._initialize_kv_caches(core, state.config)


def tokens(state: Any) -> None:
    """A request is served greedily; a rail is cut after the first token."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    scheduler = Scheduler(
        vllm_config=state.config,
        kv_cache_config=state.cache,
        structured_output_manager=StructuredOutputManager(state.config),
        block_size=state.config.cache_config.block_size,
    )
    wanted = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    request = Request("a-01234567", PROMPT, wanted, None)
    scheduler.add_request(request)
    r2ccl = parallel_state.get_tp_group().device_communicator.r2ccl
    before = len(rails_lost(r2ccl))
    while scheduler.has_unfinished_requests():
        scheduled = scheduler.schedule()
        output = state.worker.execute_model(scheduled)
        if output is None:
            output = state.worker.sample_tokens(None)
        if hasattr(output, "get_output"):
            output = output.get_output()
        scheduler.update_from_output(scheduled, output)
        if state.rank == 0 and len(request.output_token_ids) == 1:
            r2ccl.inject(0, "carrier_loss")
    if state.rank == 0:
        assert len(rails_lost(r2ccl)) > before, "no rail was lost while tokens were computed"
    say(f"rank {state.rank} tokens {' '.join(map(str, request.output_token_ids))}")


def overlapped(state: Any) -> None:
    """The request again under asynchronous scheduling, in the order of vLLM's engine core.

    A step is in the stream before the tokens of the step before it are taken.
    """
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    assert state.config.scheduler_config.async_scheduling
    scheduler = AsyncScheduler(
        vllm_config=state.config,
        kv_cache_config=state.cache,
        structured_output_manager=StructuredOutputManager(state.config),
        block_size=state.config.cache_config.block_size,
    )
    wanted = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    request = Request("b-01234567", PROMPT, wanted, None)
    scheduler.add_request(request)
    under_way: deque[tuple[Any, Any]] = deque()
    most = 0
    while scheduler.has_unfinished_requests():
        scheduled = scheduler.schedule()
        if scheduled.total_num_scheduled_tokens > 0:
            output = state.worker.execute_model(scheduled)
            if output is None:
                output = state.worker.sample_tokens(None)
            under_way.append((scheduled, output))
            most = max(most, len(under_way))
            if len(under_way) < STEPS_UNDER_WAY:
                continue
        scheduled, output = under_way.popleft()
        scheduler.update_from_output(scheduled, output.get_output())
    assert most == STEPS_UNDER_WAY, "no step began before the tokens of another were taken"
    say(f"rank {state.rank} overlapped {' '.join(map(str, request.output_token_ids))}")


def profile(state: Any) -> None:
    """A forward pass and sampling at the largest size, as vLLM measures memory."""
    state.worker.model_runner.profile_run()


def destroy(state: Any) -> None:
    """vLLM's teardown closes our communicators."""
    r2ccl = parallel_state.get_tp_group().device_communicator.r2ccl
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    assert not r2ccl._close.alive
    assert not dist.is_initialized()


STEPS = (
    platform,
    configuration,
    worker,
    device,
    collectives,
    device_group,
    graph,
    model,
    cache,
    tokens,
    *([overlapped] if os.environ.get(OVERLAPPED) else []),
    profile,
    destroy,
)


def rails_lost(r2ccl: Any) -> list[str]:
    return [event.text for event in r2ccl.events() if "->DOWN" in event.text]


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def rank_main(rank: int, path: str, port: int) -> None:
    # A rank ends by itself, even if the script was killed.
    faulthandler.dump_traceback_later(RANK_LIMIT_S, exit=True)
    os.environ["R2CCL_NODE"] = f"node{rank}"
    # Without this line a DeviceCommunicator of host tensors would use only the default stream.
    r2serve.device._current_stream = lambda _: lambda: torch.cuda.current_stream().cuda_stream
    state = SimpleNamespace(rank=rank, model=path, port=port, config=None)
    with torch_on_driver.OnTheHost():
        for step in STEPS:
            began = time.monotonic()
            try:
                with (
                    set_current_vllm_config(state.config)
                    if state.config
                    else contextlib.nullcontext()
                ):
                    step(state)
            except Exception as error:  # noqa: BLE001  the test judges the error
                traceback.print_exc()
                message = (str(error).splitlines() or [""])[0]
                say(f"rank {rank} stopped at {step.__name__}: {type(error).__name__}: {message}")
                sys.stdout.flush()
                os._exit(1)
            say(f"rank {rank} reached {step.__name__} ({time.monotonic() - began:.1f} s)")


def main(path: str, port: int) -> int:
    torch.set_num_threads(1)  # a fork would hang in OpenMP threads
    # vLLM would inspect a class by name in a process without the stand-ins.
    architecture = "LlamaForCausalLM"
    llama = resolve_obj_by_qualname(f"vllm.model_executor.models.llama.{architecture}")
    ModelRegistry.register_model(architecture, llama)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=rank_main, args=(rank, path, port)) for rank in range(2)]
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
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
