"""Stand-ins for the compiled parts of vLLM's CUDA build: Python sources import without these parts.

No stand-in computes: an operation of a model raises NotImplementedError.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent

MODULES = ("vllm._C_stable_libtorch", "vllm.vllm_flash_attn._vllm_fa2_C")
"""Empty modules. vLLM imports the first with the platform, and looks for the second."""

ANSWERS_NO = (
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_group_gemm_supported",
)
"""Questions about the GPU, asked at the import of vLLM; the answer is no."""

VIEWS = ("weak_ref_tensor", "get_cuda_view_from_cpu_tensor")
"""Operations returning a second tensor for the same memory; these work."""

KERNELS = {"silu_and_mul": "(Tensor! out, Tensor input) -> ()"}
"""Operations looked up by constructors of layers, even of layers that do not call them."""

# These variables disable CUDA kernels; Triton's interpreter runs the Triton kernels.
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",  # an empty list makes vLLM keep Triton without a driver, for Ray
    "TRITON_INTERPRET": "1",
    "TORCHDYNAMO_DISABLE": "1",  # Inductor would compile for a GPU
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


def install() -> Any:
    """Registers modules and operations; the operations last as long as the returned object."""
    import torch

    for name in MODULES:
        sys.modules[name] = ModuleType(name, __doc__)
    library = torch.library.Library("_C", "FRAGMENT")
    for name in ANSWERS_NO:
        library.define(f"{name}(int capability) -> bool")
        library.impl(name, lambda capability: False, "CompositeExplicitAutograd")
    for name in VIEWS:
        library.define(f"{name}(Tensor tensor) -> Tensor")
        library.impl(name, lambda tensor: tensor.detach(), "CPU")
    for name, signature in KERNELS.items():
        library.define(f"{name}{signature}")
        library.impl(name, _refused(name), "CPU")
    return library


def _refused(name: str) -> Any:
    def kernel(*arguments: Any) -> None:
        raise NotImplementedError(f"{name} is a kernel of vLLM")

    return kernel


def environment(folder: Path, fake_cuda: Path, release: str) -> dict[str, str]:
    """Returns the variables for a process where vLLM `release` finds a GPU.

    folder: a folder for the files written. vLLM picks a platform by the version of its
    distribution. The version in this environment contains "cpu", so a folder with other metadata
    comes first on the path.
    """
    info = folder / f"vllm-{release}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}\n")
    nvml = folder / "libnvidia-ml.so.1"
    command = ["c++", "-shared", "-fPIC", HERE / "fake_nvml.cc", "-o", nvml]
    subprocess.run(command, check=True, timeout=120)
    return {
        **ENVIRONMENT,
        "PYTHONPATH": _first(folder, "PYTHONPATH"),
        "LD_LIBRARY_PATH": _first(folder, "LD_LIBRARY_PATH"),
        "R2CCL_CUDA_LIBRARY": str(fake_cuda),
    }


def _first(folder: Path, variable: str) -> str:
    """Returns `folder` before the variable's folders, without empty entries (current folder)."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get(variable)])])
