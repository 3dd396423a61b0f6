"""Compiles every kernel for real GPUs, on a machine without a GPU; prints a JSON object.

The script replaces the kernel in each wrapper by an object that compiles at launch. Pointer types,
alignment and constants are therefore the same as in a real launch. The script runs in a separate
process without Triton's interpreter.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

DISASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int32: "*i32",
}


class Launched:
    """Replaces a jitted function: ``launched[grid](...)`` compiles instead of launching."""

    def __init__(self, function: Any, arch: int) -> None:
        self.function, self.arch = function, arch
        self.compiled: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.launch

    def launch(self, *arguments: Any, num_warps: int, **named: Any) -> None:
        options = {"num_warps": num_warps, "enable_fp_fusion": named.pop("enable_fp_fusion", True)}
        if "NATIVE" in named:
            named["NATIVE"] = self.arch >= 89
        names = self.function.arg_names
        values = dict(zip(names, arguments, strict=False)) | named
        signature, constants, attributes = {}, {}, {}
        for index, name in enumerate(names):
            value = values[name]
            by_sixteen = False
            if isinstance(value, torch.Tensor):
                signature[name] = TYPES[value.dtype]
                by_sixteen = value.data_ptr() % 16 == 0
            elif isinstance(value, float) and not name.isupper():
                signature[name] = "fp32"
            elif value is None or value == 1 or name.isupper():
                signature[name] = "constexpr"
                constants[(index,)] = value
            else:
                signature[name] = "i32" if abs(value) < 2**31 else "i64"
                by_sixteen = value % 16 == 0
            if by_sixteen:
                attributes[(index,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.function, signature, constants, attributes)
        target = GPUTarget("cuda", self.arch, 32)
        self.compiled.append(triton.compile(source, target=target, options=options))


def stack_bytes(cubin: bytes) -> int:
    """Returns the stack and local memory of a thread in bytes, reported by Triton's disassembler.

    A kernel without spilled registers uses 0 bytes.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run(
            [str(DISASSEMBLER), "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    return sum(int(found) for found in re.findall(r"(?:STACK|LOCAL):(\d+)", told.stdout))


def describe(kernel: Any) -> dict[str, Any]:
    ptx = kernel.asm["ptx"]
    operations = re.findall(r"^\s*(?:@!?%p\d+ )?([a-z][a-z0-9_]*\.[\w.:]+)", ptx, re.MULTILINE)
    return {
        "operations": {name: operations.count(name) for name in sorted(set(operations))},
        "stack_bytes": stack_bytes(kernel.asm["cubin"]),
        "ptx": ptx,
    }


def launches(arch: int) -> dict[str, Any]:
    """Returns representative launches by name; each is a call that launches a kernel."""
    arrival = importlib.import_module("r2serve.kernels.arrival")

    def number() -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int32)

    here = arrival.Arrival(number(), number(), number())

    def chunks(peers: int, dtype: torch.dtype, given: Any, count: int) -> Any:
        module = importlib.import_module("r2serve.kernels.reduce_chunks")
        slots = torch.empty(1, peers, count, dtype=dtype)
        return lambda: module.reduce_chunks(slots, arrival=given)

    def norm(name: str, peers: int, dtype: torch.dtype, given: Any, *shape: int) -> Any:
        module = importlib.import_module(f"r2serve.kernels.{name}")
        slots, residual = torch.empty(1, peers, *shape, dtype=dtype), torch.empty(shape).to(dtype)
        weight = torch.empty(shape[-1], dtype=dtype)
        return lambda: getattr(module, name)(slots, residual, weight, 1e-5, arrival=given)

    def quantise(dtype: torch.dtype) -> Any:
        module = importlib.import_module("r2serve.kernels.quantize_chunks")
        return lambda: module.quantize_chunks(torch.empty(4096, dtype=torch.bfloat16), dtype)

    def dequantise(dtype: torch.dtype) -> Any:
        module = importlib.import_module("r2serve.kernels.reduce_quantized_chunks")
        codes, scales = torch.empty(1, 4, 4096).to(dtype), torch.empty(1, 4, 32)
        return lambda: module.reduce_quantized_chunks(codes, scales, torch.bfloat16, arrival=here)

    half, brain, single = torch.float16, torch.bfloat16, torch.float32
    fused, fused_fp8 = "reduce_add_rms_norm", "reduce_add_rms_norm_fp8"
    return {
        "arrival": lambda: arrival.wait_for_arrival(here),
        "reduce_chunks bf16 x2": chunks(2, brain, here, 4096),
        "reduce_chunks f32 x16 behind": chunks(16, single, here, 2**20),
        "reduce_chunks f16 x3 odd": chunks(3, half, None, 1001),
        f"{fused} bf16 x8 8192": norm(fused, 8, brain, here, 4, 8192),
        f"{fused} bf16 x2 16384 behind": norm(fused, 2, brain, here, 100, 16384),
        f"{fused} f16 x1 odd": norm(fused, 1, half, None, 2, 2881),
        f"{fused_fp8} bf16 x4 8192": norm(fused_fp8, 4, brain, here, 4, 8192),
        "quantize_chunks fp8": quantise(torch.float8_e4m3fn),
        "quantize_chunks int8": quantise(torch.int8),
        "reduce_quantized_chunks fp8": dequantise(torch.float8_e4m3fn),
        "reduce_quantized_chunks int8": dequantise(torch.int8),
    }


def main(arch: int) -> dict[str, Any]:
    checks = importlib.import_module("r2serve.kernels.checks")
    checks.INTERPRETED = tl.constexpr(True)  # makes the wrappers accept CPU tensors; nothing runs
    arrival = importlib.import_module("r2serve.kernels.arrival")
    waiter = Launched(arrival._wait_kernel, arch)
    arrival._wait_kernel = waiter
    found = {}
    for name, call in launches(arch).items():
        module = importlib.import_module(f"r2serve.kernels.{name.split()[0]}")
        if module is arrival:
            kernel = waiter
        else:
            kernel = Launched(getattr(module._kernel, "function", module._kernel), arch)
            module._kernel = kernel
        call()
        found[name] = describe(kernel.compiled[-1])
    return found


if __name__ == "__main__":
    json.dump(main(int(sys.argv[1])), sys.stdout)
