"""Options of vLLM that exclude r2ccl are refused at start; others are accepted."""

from __future__ import annotations

import logging
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import vllm
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.platforms.cpu import CpuPlatform

from r2serve.engines import flag, releases
from r2serve.engines.vllm import carried, combinations, gpus
from r2serve.engines.vllm.cuda_communicator import SpanningCudaCommunicator
from r2serve.engines.vllm.platform import make_platform
from r2serve.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
TWO_NODES = {"nnodes": 2, "tensor_parallel_size": 4, "master_addr": "127.0.0.1"}
EXPERTS = {"enable_expert_parallel": True}
ONE_NODE = {"data_parallel_size": 2, "data_parallel_size_local": 2}
REPLICAS = {"data_parallel_size": 2, "data_parallel_size_local": 1}


class Cuda(CpuPlatform):  # type: ignore[misc]
    """A stand-in for vLLM's platform for GPUs."""

    device_type = "cuda"
    dist_backend = "nccl"

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Skips vLLM's part, which needs a GPU."""


OnGpus = make_platform(Cuda, "R2cclPlatformOfThisTest")


@pytest.fixture(autouse=True)
def nothing_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in carried.CARRIED:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(gpus, "check", lambda *_: None)
    releases.warn_if_unsupported.cache_clear()


# vLLM allows these only on GPUs, so the tests set the options after vLLM's checks.
ON_GPUS = ("enable_eplb", "enable_elastic_ep", "all2all_backend")


def engine(**parallel: Any) -> Any:
    """Returns vLLM's configuration of an engine."""
    communicator = parallel.pop("communicator", None)
    later = {key: parallel.pop(key) for key in ON_GPUS if key in parallel}
    made = VllmConfig(parallel_config=ParallelConfig(**parallel))
    for key, value in later.items():
        setattr(made.parallel_config, key, value)
    made.parallel_config.eplb_config.communicator = communicator
    return made


def refusal(monkeypatch: pytest.MonkeyPatch, platform: Any = OnGpus, **parallel: Any) -> str:
    """Returns the error text of the refusal; empty = the engine may start."""
    return refused(monkeypatch, engine(**parallel), platform)


def refused(monkeypatch: pytest.MonkeyPatch, config: Any, platform: Any = OnGpus) -> str:
    monkeypatch.setenv(flag.VARIABLE, "r2ccl")
    try:
        platform.check_and_update_config(config)
    except ConfigError as error:
        return str(error)
    return ""


BACKENDS = [
    "deepep_high_throughput",
    "deepep_low_latency",
    "deepep_v2",
    "mori_low_latency",
    "moonep",
    "nixl_ep",
    "flashinfer_all2allv",
    "flashinfer_nvlink_two_sided",
    "flashinfer_nvlink_one_sided",
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_exchange_of_experts_outside_r2ccl_is_refused(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    said = refusal(monkeypatch, **EXPERTS, **REPLICAS, all2all_backend=backend)
    assert said.startswith(f"--all2all-backend is '{backend}'")
    assert "must be allgather_reducescatter, or --distributed-backend default" in said


def test_a_moe_backend_with_a_separate_exchange_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = engine(**EXPERTS, **REPLICAS, all2all_backend="passthrough")
    config.kernel_config.moe_backend = "flashinfer_moe_ep_deep_gemm"
    said = refused(monkeypatch, config)
    assert said.startswith("--moe-backend is 'flashinfer_moe_ep_deep_gemm', which exchanges tokens")
    assert "must be a back end that does not exchange tokens itself, such as auto, or --" in said


@pytest.mark.parametrize(
    "fine",
    [
        {**EXPERTS, **REPLICAS, "all2all_backend": "allgather_reducescatter"},
        # Without parallel experts, or without an exchange, vLLM ignores the option.
        {**REPLICAS, "all2all_backend": "deepep_low_latency"},
        {**EXPERTS, **TWO_NODES, "all2all_backend": "deepep_low_latency"},
        # All experts of a stage are on the same node: vLLM's communicator carries the exchange.
        {**EXPERTS, **ONE_NODE, "all2all_backend": "deepep_low_latency"},
        {
            **EXPERTS,
            **TWO_NODES,
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 2,
            "enable_eplb": True,
            "communicator": "pynccl",
        },
        # Only a worker knows the nodes of the other replicas.
        {**EXPERTS, **REPLICAS, "data_parallel_external_lb": True, "all2all_backend": "nixl_ep"},
        {**EXPERTS, **TWO_NODES, "enable_eplb": True, "communicator": "torch_nccl"},
        {**EXPERTS, **TWO_NODES, "enable_eplb": True, "communicator": "torch_gloo"},
        {**EXPERTS, **TWO_NODES, "enable_eplb": True, "communicator": "nixl"},
        {**EXPERTS, **TWO_NODES, "communicator": "pynccl"},  # without --enable-eplb
    ],
    ids=str,
)
def test_supported_combinations_are_accepted(
    monkeypatch: pytest.MonkeyPatch, fine: dict[str, Any]
) -> None:
    assert refusal(monkeypatch, **fine) == ""


def test_nothing_is_refused_without_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    config = engine(**EXPERTS, **REPLICAS, all2all_backend="deepep_v2", enable_elastic_ep=True)
    monkeypatch.setenv(flag.VARIABLE, "default")
    OnGpus.check_and_update_config(config)


def test_the_cpu_platform_has_a_single_exchange_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM logs a warning and continues with allgather_reducescatter."""
    monkeypatch.setattr(CpuPlatform, "check_and_update_config", lambda _: None)
    ours = make_platform(CpuPlatform, "R2cclCpuPlatform")
    assert refusal(monkeypatch, ours, **EXPERTS, **REPLICAS, all2all_backend="nixl_ep") == ""


@pytest.mark.parametrize("nodes", [{}, TWO_NODES], ids=["one node", "two nodes"])
def test_elastic_groups_are_refused(monkeypatch: pytest.MonkeyPatch, nodes: dict[str, Any]) -> None:
    said = refusal(monkeypatch, **EXPERTS, **nodes, enable_elastic_ep=True)
    assert said.startswith("--enable-elastic-ep is True")
    assert "--enable-elastic-ep must be left out, or --distributed-backend default" in said


@pytest.mark.parametrize(
    "across",
    [TWO_NODES, REPLICAS, {**TWO_NODES, "tensor_parallel_size": 2, "pipeline_parallel_size": 3}],
    ids=["tensor parallel", "data parallel", "a stage on two nodes"],
)
def test_nccl_for_the_placement_of_experts_is_refused(
    monkeypatch: pytest.MonkeyPatch, across: dict[str, Any]
) -> None:
    asked = {"enable_eplb": True, "communicator": "pynccl"}
    said = refusal(monkeypatch, **EXPERTS, **across, **asked)
    assert said.startswith("--eplb-config.communicator is 'pynccl'")
    assert "must be nixl, torch_gloo or torch_nccl" in said


@pytest.mark.parametrize(
    ("parallel", "refused_here"),
    [
        ({}, False),  # an engine inside one node has no rails
        (TWO_NODES, True),
        (REPLICAS, True),
    ],
    ids=["one node", "two nodes", "replicas"],
)
def test_a_wrong_name_of_a_rail_is_told_before_workers_start(
    monkeypatch: pytest.MonkeyPatch, parallel: dict[str, Any], refused_here: bool
) -> None:
    monkeypatch.setenv("R2CCL_RAILS", "203.0.113.77")
    said = refusal(monkeypatch, **parallel)
    assert said.startswith("rails (R2CCL_RAILS) is '203.0.113.77': it ") is refused_here, said


@pytest.mark.parametrize(
    ("changed", "here"),
    [
        ({}, True),
        ({"data_parallel_size_local": 0}, False),
        ({"data_parallel_backend": "ray"}, False),
        ({"distributed_executor_backend": "ray"}, False),
    ],
    ids=["replicas", "API server alone", "Ray's replicas", "Ray"],
)
def test_a_node_that_may_have_no_rank_needs_no_rails(changed: dict[str, Any], here: bool) -> None:
    parallel = engine(**REPLICAS).parallel_config
    for name, value in changed.items():
        setattr(parallel, name, value)
    assert combinations.has_ranks_here(parallel) is here


def test_per_rank_nodes_count_as_several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {**EXPERTS, **ONE_NODE, "all2all_backend": "nixl_ep"}
    assert refusal(monkeypatch, **asked) == ""
    monkeypatch.setenv("R2CCL_NODE", "per-rank")
    assert refusal(monkeypatch, **asked).startswith("--all2all-backend is 'nixl_ep'")


def test_replicas_from_the_environment_are_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_DP_SIZE", "2")
    assert refusal(monkeypatch, **EXPERTS, **REPLICAS, all2all_backend="nixl_ep") == ""


@pytest.mark.parametrize(
    ("group", "asked", "option"),
    [
        ("ep:0", {**EXPERTS, "all2all_backend": "nixl_ep"}, "--all2all-backend"),
        ("eplb:0", {"enable_eplb": True, "communicator": "pynccl"}, "--eplb-config.communicator"),
    ],
)
def test_a_worker_checks_its_groups_again(group: str, asked: dict[str, Any], option: str) -> None:
    config = engine(**REPLICAS, **asked)
    with pytest.raises(ConfigError, match=option):
        combinations.refuse_in_group(group, config)
    for other in ("tp:0", "dp:0", "world"):
        combinations.refuse_in_group(other, config)


def test_a_group_is_refused_before_it_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    config = engine(**EXPERTS, **REPLICAS, all2all_backend="deepep_v2")
    connect = Mock()
    monkeypatch.setattr(SpanningCudaCommunicator, "connect", connect)
    group = object.__new__(SpanningCudaCommunicator)
    with set_current_vllm_config(config), pytest.raises(ConfigError, match="--all2all-backend"):
        group.__init__(None, unique_name="ep:0", use_all2all=True)  # type: ignore[misc]
    connect.assert_not_called()


# ---- supported releases ----


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        *((version, True) for version in ("0.32.0", "0.32.0+cpu", "0.33.0", "0.33.1.dev4+g12ab")),
        *((version, False) for version in ("0.31.2", "0.34.0", "0.34.0rc1", "1.0", "dev")),
    ],
)
def test_a_release_out_of_the_supported_range_is_named_once(
    version: str,
    supported: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    said: Callable[[], list[str]],
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    config = engine()

    with caplog.at_level(logging.WARNING, logger="r2serve"):
        OnGpus.check_and_update_config(config)  # without the flag
        assert said() == []
        monkeypatch.setenv(flag.VARIABLE, "r2ccl")
        config.parallel_config.worker_cls = "vllm.v1.worker.cpu_worker.CPUWorker"
        for _ in range(2):
            OnGpus.check_and_update_config(config)
    assert len(said()) == int(not supported)
    for line in said():
        assert f"vLLM {version} is out of the range supported by" in line
        assert "(vllm>=0.32,<0.34)" in line


def test_the_package_requires_the_supported_releases() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for engine, supported in releases.SUPPORTED.items():
        assert [each for each in extras[engine] if each.startswith(engine)] == [
            f"{engine}{supported}"
        ]


def test_serving_imports_no_table_of_rows() -> None:
    every = (ROOT / "r2serve/engines/vllm").glob("*.py")
    sources = [each for each in every if not each.name.startswith("relies_on")]
    assert len(sources) > 10
    assert [
        each.name for each in sources if re.search(r"import .*\brelies_on", each.read_text())
    ] == []
