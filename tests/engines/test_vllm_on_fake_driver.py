"""vLLM's GPU workers, one on each of two nodes, serve a model on the fake CUDA driver.

This environment has no GPU, no CUDA in torch and no compiled extension of vLLM. The script
`vllm_cuda_ranks.py` runs the steps below, and both ranks must reach each step.

=============  ================================================  ==================================
step           parts of vLLM and r2serve in use                  limit, with the reason
=============  ================================================  ==================================
platform       detection by NVML and our entry point pick a
               subclass of ``NvmlCudaPlatform``
configuration  ``EngineArgs``; our ``check_and_update_config``   the engine is eager: Inductor would
               with checks of kernels and driver                 compile for a GPU
worker         ``gpu_worker.Worker`` and our subclass
device         ``init_device``: ``dist_backend`` r2ccl,
               ``init_distributed_environment``,
               ``initialize_model_parallel``,
               ``GroupCoordinator``, ``use_custom_op_call``,
               our CUDA communicator, the model runner
collectives    all of ``GroupCoordinator`` and of the
               communicator, through ``torch.ops.vllm``
device_group   ``device_group`` and a sibling group              our backend carries CPU tensors on
                                                                 its host path
graph          ``graph_capture``, ``CUDAGraphWrapper``, replays  torch's operations are in no
               with rails cut                                    graph, so no model is captured
model          weights from files, half of them on each rank
cache          layout and memory of the KV cache
tokens         scheduler, ``execute_model``, attention in        layers use vLLM's Python code
               Triton's interpreter, sampling, our check of      instead of the kernels of ``_C``
               outputs; a rail is cut
overlapped     ``AsyncScheduler``, asynchronous outputs: the     only in its long test
               next step begins before tokens are taken
profile        ``profile_run``: forward and sampler at full      ``compile_or_warm_up_model`` is not
               size                                              called: kernels only
destroy        vLLM's teardown closes our communicators
=============  ================================================  ==================================

The complete list of replaced parts:

=====================================  ============================================================
replaced                               by
=====================================  ============================================================
libcuda                                ``fake_cuda``: bodies of our kernels, streams, graphs
libnvidia-ml                           ``fake_nvml.cc``: one device of 80 GiB
torch.cuda, torch.accelerator          ``torch_on_driver``: streams, events and graphs of the fake
                                       driver; memory is not counted
tensors on ``cuda``                    tensors on the CPU; pinned memory is plain memory
``_current_stream`` of r2serve.device  torch.cuda's, although tensors are on the CPU
``dispatch_key`` of the platform       ``CPU``, the place of the tensors
distribution ``vllm``                  metadata of a release without "cpu" in its version
``vllm._C_stable_libtorch``,           empty modules, and operations with the answer "no" or an
``vllm_flash_attn._vllm_fa2_C``        error: ``vllm_without_kernels``
fused vocabulary embedding             the layer's code without the kernel
RMSNorm and custom operations          vLLM's native versions, by options of vLLM
FlashInfer's sampler                   vLLM's sampler, by ``VLLM_USE_FLASHINFER_SAMPLER``
compiler of Triton, torch.compile      interpreter of Triton, none
inspection of models in a new process  ``ModelRegistry.register_model``
engine core and executor               its ``_initialize_kv_caches``; a loop over vLLM's scheduler
=====================================  ============================================================

vLLM 0.33 has no build for CPUs, so the long test uses the Python files of the CUDA wheel. torch and
Triton stay those of this environment. Release 0.33 stops at `profile`: Triton's interpreter cannot
run the kernel of its sampler for top-k.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import vllm_without_kernels
from ports import free_port
from transformers import LlamaForCausalLM

from r2serve.lab.serving.model import TinyLlama, make_tiny_llama

SCRIPT = Path(__file__).with_name("vllm_cuda_ranks.py")
SHAPE = TinyLlama(layers=2, hidden=128, intermediate=256, heads=4, key_value_heads=2)
STEPS = (
    *("platform", "configuration", "worker", "device", "collectives", "device_group", "graph"),
    *("model", "cache", "tokens", "profile", "destroy"),
)
PROMPT = list(range(5, 25))
DOWNLOAD_S = 600
SCRIPT_LIMIT_S = 1200  # the ranks end after 900 s, with tracebacks
STOP_OF_0_33 = "InterpreterError: AttributeError(\"'int' object has no attribute 'to'\")"


@pytest.fixture(scope="module")
def small_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("small") / "llama", SHAPE)


@pytest.fixture(scope="module")
def expected_tokens(small_llama: Path) -> list[int]:
    """Greedy tokens of the model in a single process, computed by transformers."""
    model = LlamaForCausalLM.from_pretrained(small_llama, dtype=torch.float32)
    said = list(PROMPT)
    with torch.inference_mode():
        for _ in range(3):
            said.append(int(model(torch.tensor([said])).logits[0, -1].argmax()))
    return said[len(PROMPT) :]


class Job:
    """Output of a run of the script."""

    def __init__(self, model: Path, environment: dict[str, str]) -> None:
        try:
            done = self._run(model, environment)
        except subprocess.TimeoutExpired as late:
            output = (late.stdout or b"").decode(errors="replace")
            pytest.fail(f"the script did not end within {late.timeout:g} s:\n{output[-6000:]}")
        self.status, self.output = done.returncode, done.stdout

    def _run(self, model: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, SCRIPT, str(model), str(free_port())],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "VLLM_HOST_IP": "127.0.0.1",
                "GLOO_SOCKET_IFNAME": "lo",
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "R2SERVE_DISTRIBUTED_BACKEND": "r2ccl",
                "R2CCL_RAILS": "127.0.0.1,127.0.0.2",
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SCRIPT_LIMIT_S,
            check=False,
        )

    def reached(self, rank: int) -> list[str]:
        return re.findall(rf"^rank {rank} reached (\w+)", self.output, re.MULTILINE)

    def stopped(self) -> set[str]:
        """Returns step and error of each stopped rank."""
        return set(re.findall(r"^rank \d stopped at (.*)", self.output, re.MULTILINE))

    def tokens(self, rank: int, step: str = "tokens") -> list[int]:
        [said] = re.findall(rf"^rank {rank} {step} ([\d ]+)$", self.output, re.MULTILINE)
        return [int(each) for each in said.split()]


def test_workers_of_two_nodes_serve_a_model(
    small_llama: Path, expected_tokens: list[int], fake_cuda: Path, tmp_path: Path
) -> None:
    job = Job(small_llama, vllm_without_kernels.environment(tmp_path, fake_cuda, "0.32.0"))
    for rank in range(2):
        assert job.reached(rank) == list(STEPS), job.output[-6000:]
        assert job.tokens(rank) == expected_tokens
    assert job.status == 0, job.output[-6000:]


@pytest.mark.long
def test_a_step_may_begin_before_the_tokens_of_the_last_are_taken(
    small_llama: Path, expected_tokens: list[int], fake_cuda: Path, tmp_path: Path
) -> None:
    """Asynchronous scheduling: the comparison of positions ends no step for no reason."""
    environment = vllm_without_kernels.environment(tmp_path, fake_cuda, "0.32.0")
    job = Job(small_llama, {**environment, "R2SERVE_TEST_OVERLAPPED": "1"})
    at = STEPS.index("profile")
    for rank in range(2):
        assert job.reached(rank) == [*STEPS[:at], "overlapped", *STEPS[at:]], job.output[-6000:]
        assert job.tokens(rank, "overlapped") == expected_tokens
    assert job.status == 0, job.output[-6000:]
    assert "OrderMismatch" not in job.output


@pytest.mark.long
def test_the_next_vllm_release_reaches_the_recorded_step(
    small_llama: Path, expected_tokens: list[int], fake_cuda: Path, tmp_path: Path, show
) -> None:
    """Fails if vLLM 0.33 stops at another step or error, earlier or later: look at the change."""
    sources = tmp_path / "sources"
    sources.mkdir()
    unpack_python(wheel_of("vllm==0.33.0", tmp_path), sources)
    job = Job(small_llama, vllm_without_kernels.environment(sources, fake_cuda, "0.33.0"))
    farthest = STEPS[: STEPS.index("profile")]
    for rank in range(2):
        assert job.reached(rank) == list(farthest), job.output[-6000:]
        assert job.tokens(rank) == expected_tokens
    assert job.stopped() == {f"profile: {STOP_OF_0_33}"}, job.output[-6000:]
    show(f"vLLM 0.33.0 reached {', '.join(farthest)}; stopped at {job.stopped().pop()}")


def wheel_of(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", requirement]
    done = subprocess.run(
        [*command, "--only-binary=:all:", "--no-cache-dir", "--dest", folder],
        capture_output=True,
        text=True,
        timeout=DOWNLOAD_S,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"no {requirement} from the package index: {done.stderr.strip()[-200:]}")
    [wheel] = folder.glob("*.whl")
    return wheel


def unpack_python(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith((".py", ".json")):
                archive.extract(name, folder)
    wheel.unlink()  # 0.3 GB
