"""Missing support in GPU, driver and build is reported at start, before a worker is created."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.config import ParallelConfig, VllmConfig
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.platforms.cpu import CpuPlatform

from r2serve import _core
from r2serve.engines import flag
from r2serve.engines.vllm import carried, gpus
from r2serve.engines.vllm.cuda_communicator import SpanningCudaCommunicator
from r2serve.engines.vllm.platform import make_platform
from r2serve.errors import ConfigError

LIBRARY = "libcuda.so.1"


def a_driver(monkeypatch: pytest.MonkeyPatch, version: int, code: int = 0) -> None:
    """Installs a driver with only `cuDriverGetVersion`: any other call is an AttributeError."""

    def answer(where: Any) -> int:
        where._obj.value = version
        return code

    driver = SimpleNamespace(cuDriverGetVersion=answer)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: {LIBRARY: driver}[name])


@pytest.fixture(autouse=True)
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "has_kernels", lambda: True)


@pytest.mark.parametrize("version", [11000, 11020, 12090, 13000])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0), None])
def test_supported_drivers_and_gpus_are_accepted(
    monkeypatch: pytest.MonkeyPatch, version: int, capability: tuple[int, int] | None
) -> None:
    a_driver(monkeypatch, version)
    gpus.check(LIBRARY, capability)


def test_the_driver_version_is_a_cuda_version(monkeypatch: pytest.MonkeyPatch) -> None:
    a_driver(monkeypatch, 12090)
    assert str(gpus.driver_version(LIBRARY)) == "12.9"


def refused(capability: tuple[int, int] | None = (9, 0), library: str = LIBRARY) -> str:
    with pytest.raises(ConfigError) as raised:
        gpus.check(library, capability)
    return str(raised.value)


def test_a_build_without_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "has_kernels", lambda: False)
    a_driver(monkeypatch, 13000)
    said = refused()
    assert said == (
        "--distributed-backend is 'r2ccl' for GPUs on several nodes, but this build of r2serve has "
        "no GPU kernels: install r2serve where nvcc is in PATH, or use --distributed-backend "
        "default, without failover"
    )


def test_a_too_old_driver_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    a_driver(monkeypatch, 10020)
    said = refused()
    assert said.startswith("the CUDA driver (R2CCL_CUDA_LIBRARY: libcuda.so.1) is of CUDA 10.2")
    assert said.endswith("it must be of CUDA 11.0 or later")


def test_a_too_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    a_driver(monkeypatch, 13000)
    said = refused((7, 5))
    assert said == "the GPU has compute capability 7.5: it must be 8.0 or later"


@pytest.mark.parametrize(("version", "code"), [(0, 0), (0, 34), (12000, 999)])
def test_a_driver_without_a_version_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: int, code: int
) -> None:
    a_driver(monkeypatch, version, code)
    assert f"whose cuDriverGetVersion answered {code} and version {version}" in refused()


@pytest.mark.parametrize("library", ["libno-such-driver.so.1", "libc.so.6"])
def test_a_library_that_is_no_driver_is_refused(library: str) -> None:
    said = refused(library=library)
    assert said.startswith(f"cuda_library (R2CCL_CUDA_LIBRARY) is '{library}', which is no CUDA")


# ---- the start of an engine ----


class Cuda(CpuPlatform):  # type: ignore[misc]
    """A stand-in for vLLM's platform for GPUs, with an old GPU."""

    device_type = "cuda"
    dist_backend = "nccl"
    asked = 0

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Skips vLLM's part, which needs a GPU."""

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> tuple[int, int]:
        Cuda.asked += 1
        return (7, 5)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    for variable in carried.CARRIED:
        monkeypatch.delenv(variable, raising=False)
    two_nodes = ParallelConfig(nnodes=2, tensor_parallel_size=2, master_addr="127.0.0.1")
    made = VllmConfig(parallel_config=two_nodes)
    monkeypatch.setenv(flag.VARIABLE, "r2ccl")
    a_driver(monkeypatch, 12080)
    monkeypatch.setattr(Cuda, "asked", 0)
    module = ModuleType("of_this_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(Cuda, "__module__", module.__name__)
    return made


@pytest.mark.parametrize("nvml", [True, False])
def test_an_engine_checks_the_gpu_before_it_creates_workers(
    engine: Any, nvml: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without NVML vLLM would initialise CUDA, and forked workers could not use CUDA."""
    ours = make_platform(Cuda, f"OnGpus{nvml}")
    monkeypatch.setattr(sys.modules["of_this_test"], "nvml_available", nvml, raising=False)
    if nvml:
        with pytest.raises(ConfigError, match=r"compute capability 7\.5: it must be 8\.0"):
            ours.check_and_update_config(engine)
    else:
        ours.check_and_update_config(engine)
    assert Cuda.asked == int(nvml)


def test_an_old_driver_stops_an_engine(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    a_driver(monkeypatch, 10000)
    with pytest.raises(ConfigError, match=r"is of CUDA 10\.0: it must be of CUDA 11\.0 or later"):
        make_platform(Cuda, "OnGpus").check_and_update_config(engine)


REPLICAS = {"data_parallel_size": 2, "data_parallel_size_local": 1}


@pytest.mark.parametrize(
    ("parallel", "environment", "spans"),
    [
        ({}, {}, "0"),
        ({**REPLICAS, "data_parallel_external_lb": True}, {}, "1"),
        (REPLICAS, {"VLLM_DP_SIZE": "2"}, "1"),
        ({**REPLICAS, "data_parallel_backend": "ray"}, {}, "1"),
        ({"distributed_executor_backend": "ray"}, {}, "1"),
    ],
    ids=["one node", "external load balancer", "VLLM_DP_SIZE", "Ray's replicas", "Ray"],
)
def test_an_engine_possibly_on_one_node_needs_no_kernels(
    engine: Any,
    monkeypatch: pytest.MonkeyPatch,
    parallel: dict[str, Any],
    environment: dict[str, str],
    spans: str,
) -> None:
    """Groups inside a node keep vLLM's communicator; workers of other groups check later."""
    monkeypatch.setattr(_core, "has_kernels", lambda: False)
    engine.parallel_config.nnodes = 1
    for key, value in parallel.items():
        setattr(engine.parallel_config, key, value)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    make_platform(Cuda, "OnGpus").check_and_update_config(engine)
    assert Cuda.asked == 0
    assert os.environ[flag.SPANS_VARIABLE] == spans


@pytest.mark.parametrize(
    "known",
    [{"nnodes": 2}, {"nnodes": 1, **REPLICAS}, {"nnodes": 1, "of_each_rank": True}],
    ids=["nodes", "replicas", "per-rank"],
)
def test_an_engine_known_to_span_nodes_needs_kernels(
    engine: Any, monkeypatch: pytest.MonkeyPatch, known: dict[str, Any]
) -> None:
    monkeypatch.setattr(_core, "has_kernels", lambda: False)
    if known.pop("of_each_rank", False):
        monkeypatch.setenv("R2CCL_NODE", "per-rank")
    for key, value in known.items():
        setattr(engine.parallel_config, key, value)
    with pytest.raises(ConfigError, match="no GPU kernels"):
        make_platform(Cuda, "OnGpus").check_and_update_config(engine)


@pytest.mark.parametrize("ordinal", [None, 0, 1])
def test_a_worker_repeats_the_checks_with_the_same_errors(
    monkeypatch: pytest.MonkeyPatch, ordinal: int | None
) -> None:
    a_driver(monkeypatch, 13000)
    found = [{"major": 8, "minor": 0}, {"major": 7, "minor": 5}]
    monkeypatch.setattr(_core, "gpus", lambda library: {LIBRARY: found}[library])
    connected = Mock(side_effect=InterruptedError)
    monkeypatch.setattr(DeviceCommunicatorBase, "__init__", connected)
    group = object.__new__(SpanningCudaCommunicator)
    error = ConfigError if ordinal == 1 else InterruptedError
    with pytest.raises(error) as raised:
        group.__init__(None, torch.device("cuda", ordinal))  # type: ignore[misc]
    if ordinal == 1:
        connected.assert_not_called()
        assert str(raised.value) == refused((7, 5))
    monkeypatch.setattr(_core, "has_kernels", lambda: False)
    with pytest.raises(ConfigError) as raised:
        group.__init__(None, torch.device("cuda", ordinal))  # type: ignore[misc]
    assert str(raised.value) == refused()
