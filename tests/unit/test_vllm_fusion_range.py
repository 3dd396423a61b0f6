"""The fused operation replaces three operations only if a single kernel can do all of them."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from ports import free_port

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.config import CompilationConfig, ParallelConfig, VllmConfig
from vllm.config.utils import Range
from vllm.platforms.cpu import CpuPlatform

from r2serve.communicator import Communicator
from r2serve.config import Config
from r2serve.device import DeviceCommunicator
from r2serve.engines import flag
from r2serve.engines.vllm import carried, fusion, fusion_range, gpus
from r2serve.engines.vllm.cuda_communicator import SpanningCudaCommunicator
from r2serve.engines.vllm.platform import make_platform
from r2serve.fused import FusedReduce

HIDDEN = 7168
STAGING = 8 * 1024**2
CAPACITY = 292  # rows of 7168 x bfloat16 in half of the staging memory
PER_RANK = {"tensor_parallel_size": 2, "nnodes": 2, "master_addr": "127.0.0.1"}


def of_gpus(nodes: Sequence[int], most_bytes: int) -> Any:
    """Returns the communicator of a group over GPUs, without rails; slots take `most_bytes`."""
    size = 4 * 1024
    memory = (ctypes.c_uint8 * size)()
    core = Mock()
    core.memory = memory
    core.slots.return_value = {
        **dict.fromkeys(("base", "sequence", "arrived", "abort"), ctypes.addressof(memory)),
        **dict.fromkeys(("ring", "most_bytes"), 1),
        **dict.fromkeys(("entry_bytes", "direct_base"), 0),
    }
    fused = FusedReduce(core, lambda: 0, nodes, torch.device("cpu"))
    fused._memory["most_bytes"] = most_bytes
    made = object.__new__(SpanningCudaCommunicator)
    made.r2ccl = SimpleNamespace(fused=fused, nodes=nodes)
    made.world_size = len(nodes)
    return made


def the_pass(
    monkeypatch: pytest.MonkeyPatch,
    communicator: Any,
    hidden: int = HIDDEN,
    dtype: torch.dtype = torch.bfloat16,
    **compilation: Any,
) -> fusion.AllReduceAddRmsNormPass:
    """Returns the compiler's pass of a group; registered patterns are not traced."""
    group = SimpleNamespace(device_communicator=communicator, unique_name="tp:0")
    monkeypatch.setattr(fusion, "get_tp_group", lambda: group)
    monkeypatch.setattr(
        fusion.AllReduceAddRmsNormPass,
        "register",
        lambda self, pattern: self._pattern_replacements.append(pattern),
    )
    model = SimpleNamespace(
        hf_text_config=SimpleNamespace(rms_norm_eps=1e-5),
        get_hidden_size=lambda: hidden,
        dtype=dtype,
    )
    config = SimpleNamespace(
        compilation_config=CompilationConfig(**compilation), model_config=model, device_config=None
    )
    return fusion.AllReduceAddRmsNormPass(config)


def test_two_nodes_of_eight_keep_vllms_passes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, said: Callable[[], list[str]]
) -> None:
    with caplog.at_level(logging.INFO, logger="r2serve"):
        made = the_pass(monkeypatch, of_gpus([0] * 8 + [1] * 8, STAGING // 16))
    assert made._pattern_replacements == []
    assert not made.is_applicable_for_range(Range(1, 1))
    assert why_three(said()) == "16 ranks are on 2 nodes; each rank must be on a separate node"


def why_three(lines: list[str]) -> str:
    (line,) = lines
    before, _, why = line.partition("RMSNorm stay three operations: ")
    assert before == "group tp:0: all-reduce, addition and "
    return why


@pytest.mark.parametrize(
    ("ranks", "hidden", "dtype", "staging", "why"),
    [
        (2, 16392, torch.bfloat16, STAGING, "a row has 16392 elements; the limit is 16384"),
        (
            2,
            HIDDEN,
            torch.float64,
            STAGING,
            "rows are of float64; the operation takes float16, bfloat16, float32",
        ),
        (
            16,
            16384,
            torch.float32,
            1024**2 - 2048,
            "a row has 65536 bytes; the limit is 65408 (R2CCL_GPU_STAGING_BYTES / ranks)",
        ),
        (17, HIDDEN, torch.bfloat16, STAGING, "the group has 17 ranks; the limit is 16"),
    ],
)
def test_rows_without_a_kernel_stay_three_operations(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    said: Callable[[], list[str]],
    ranks: int,
    hidden: int,
    dtype: torch.dtype,
    staging: int,
    why: str,
) -> None:
    config = SimpleNamespace(gpu_staging_bytes=staging)
    monkeypatch.setattr(fusion.Config, "from_env", lambda: config)
    communicator = of_gpus(list(range(ranks)), fusion_range.slot_bytes(staging, ranks))
    with caplog.at_level(logging.INFO, logger="r2serve"):
        made = the_pass(monkeypatch, communicator, hidden, dtype)
    assert made._pattern_replacements == []
    assert not made.is_applicable_for_range(Range(1, 1))
    assert why_three(said()) == why
    assert fusion_range.most_rows(staging, ranks, hidden, dtype) == 0


@pytest.mark.parametrize(
    ("ends", "sizes", "fused"),
    [
        ([CAPACITY, 8192], [], True),
        ([CAPACITY + 1, 8192], [], False),
        ([8192], [16], True),
        ([8192], [], False),
    ],
)
def test_too_large_ranges_are_named(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    said: Callable[[], list[str]],
    ends: list[int],
    sizes: list[int],
    fused: bool,
) -> None:
    with caplog.at_level(logging.INFO, logger="r2serve"):
        made = the_pass(
            monkeypatch,
            of_gpus([0, 1], STAGING // 2),
            compile_ranges_endpoints=ends,
            compile_sizes=sizes,
        )
    assert bool(made._pattern_replacements) is fused
    if not fused:
        assert why_three(said()) == (
            f"the smallest range of compilation ends at {ends[0]} rows; the limit is {CAPACITY} "
            "(R2CCL_GPU_STAGING_BYTES / ranks / bytes of a row)"
        )


def test_one_rank_a_node_is_fused_up_to_the_size_of_its_slots(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, said: Callable[[], list[str]]
) -> None:
    with caplog.at_level(logging.INFO, logger="r2serve"):
        made = the_pass(monkeypatch, of_gpus([0, 1], STAGING // 2))
    assert len(made._pattern_replacements) == 2
    assert made.is_applicable_for_range(Range(1, CAPACITY))
    assert not made.is_applicable_for_range(Range(1, CAPACITY + 1))
    assert said() == []


@pytest.mark.parametrize("ranks", [2, 3, 7, 16])
@pytest.mark.parametrize("hidden", [64, 2880, HIDDEN, 16384])
@pytest.mark.parametrize("staging", [1024**2, STAGING, 12_345_678])
def test_ranges_end_at_the_limit_of_the_operation(ranks: int, hidden: int, staging: int) -> None:
    communicator = of_gpus(list(range(ranks)), fusion_range.slot_bytes(staging, ranks))
    rows = fusion_range.most_rows(staging, ranks, hidden, torch.bfloat16)
    assert rows == 0 or communicator.fuses((rows, hidden), torch.bfloat16)
    assert not communicator.fuses((rows + 1, hidden), torch.bfloat16)


@pytest.mark.parametrize(("ranks", "staging"), [(2, STAGING), (2, 1024**2 + 384), (3, 12_345_678)])
def test_the_slot_size_equals_the_cores(ranks: int, staging: int, fake_cuda: Path) -> None:
    port = free_port()

    def most_bytes(rank: int) -> int:
        config = Config(
            rails="127.0.0.1",
            node=f"n{rank}",
            cuda_library=str(fake_cuda),
            gpu_staging_bytes=staging,
        )
        host = Communicator.standalone(
            "127.0.0.1", port, rank, ranks, name="tp", config=config, share_engine=False
        )
        with DeviceCommunicator(host, torch.device("cpu")) as comm:
            found: int = comm._stream_core.slots()["most_bytes"]
            return found

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(most_bytes, range(ranks), timeout=300))
    assert found == [fusion_range.slot_bytes(staging, ranks)] * ranks


class Cuda(CpuPlatform):  # type: ignore[misc]
    """A stand-in for vLLM's platform for GPUs."""

    device_type = "cuda"
    dist_backend = "nccl"

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Skips vLLM's part, which needs a GPU."""


OnGpus = make_platform(Cuda, "R2cclPlatformOfThisTest")


def ranges(
    monkeypatch: pytest.MonkeyPatch,
    own: list[int] | None = None,
    hidden: Sequence[int] = (HIDDEN,),
    **parallel: Any,
) -> Any:
    """Returns vLLM's compile ranges after the platform's hook.

    Args:
        hidden: hidden size of a model, then of parts and drafts sharing the configuration.
    """
    for variable in set(carried.CARRIED) - {"R2CCL_FUSE", "R2CCL_NODE"}:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(gpus, "check", lambda *_: None)
    executor = parallel.pop("executor", "mp")
    config: Any = SimpleNamespace(
        parallel_config=ParallelConfig(**parallel),
        compilation_config=CompilationConfig(compile_ranges_endpoints=own),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192),
        additional_config={},
        shutdown_timeout=0,
    )
    # set later, because vLLM looks for Ray's package
    config.parallel_config.distributed_executor_backend = executor
    monkeypatch.setenv(flag.VARIABLE, "r2ccl")
    for size in hidden:
        config.model_config = SimpleNamespace(
            get_hidden_size=lambda size=size: size, dtype=torch.bfloat16
        )
        OnGpus.check_and_update_config(config)
        VllmConfig._set_compile_ranges(config)
    return [(each.start, each.end) for each in config.compilation_config.get_compile_ranges()]


def test_decode_steps_get_separate_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranges(monkeypatch, **PER_RANK) == [(1, CAPACITY), (CAPACITY + 1, 8192)]
    assert Config().gpu_staging_bytes == STAGING
    asked = ranges(monkeypatch, [1024], **PER_RANK)
    assert asked == [(1, CAPACITY), (CAPACITY + 1, 1024), (1025, 8192)]
    assert ranges(monkeypatch, [CAPACITY], **PER_RANK) == [(1, CAPACITY), (CAPACITY + 1, 8192)]


def test_parts_and_drafts_of_a_model_add_no_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ranges(monkeypatch, hidden=(HIDDEN, HIDDEN, 1280, 2048), **PER_RANK)
    assert found == [(1, CAPACITY), (CAPACITY + 1, 8192)]


@pytest.mark.parametrize(
    "parallel",
    [
        {**PER_RANK, "tensor_parallel_size": 16},  # 8 ranks on each node
        {**PER_RANK, "tensor_parallel_size": 1, "pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "executor": "ray"},
        {**PER_RANK, "tensor_parallel_size": 17, "nnodes": 17},
        {**PER_RANK, "hidden": [32768]},
    ],
    ids=["two nodes of eight", "stages", "one node", "Ray", "17 ranks", "32768 elements a row"],
)
def test_groups_without_fusion_are_compiled_as_before(
    monkeypatch: pytest.MonkeyPatch, parallel: dict[str, Any]
) -> None:
    assert ranges(monkeypatch, **parallel) == [(1, 8192)]


def test_ranges_stay_whole_if_fusion_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R2CCL_FUSE", "off")
    assert ranges(monkeypatch, **PER_RANK) == [(1, 8192)]
