"""Rows about Triton: the kernels rely on these seams.

Tests compare every row with facts from the sources of every release;
``tests/engines/contracts/README.md`` has the table.
"""

from __future__ import annotations

from r2serve.seams import Accepts, Expectation, Has, Row, Says, There

RELEASES = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
"""Releases of Triton judged by the rows."""

_LANGUAGE = "triton.language"
_TYPES = (
    "bfloat16",
    "float32",
    "float8e4nv",
    "int8",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
)


def _row(seam: str, purpose: str, exit_: str, *expects: Expectation) -> Row:
    return Row(seam, purpose, exit_, expects, RELEASES)


ROWS = (
    _row(
        "triton.jit and the interpreter",
        "compiles a kernel; with TRITON_INTERPRET interprets a kernel",
        "",
        Accepts("triton.jit", "function"),
        Has("triton.knobs.runtime", ("interpret",)),
        There("triton.knobs.runtime.interpret", "env_bool('TRITON_INTERPRET')"),
        There("triton.runtime.interpreter.InterpretedFunction"),
        Has("triton.runtime.jit.JITFunction", ("fn",)),
    ),
    _row(
        "inline_asm_elementwise",
        "reads a word of the host with acquire order, once a thread",
        "the language has a load with an order and a scope on every supported release",
        Accepts(
            f"{_LANGUAGE}.inline_asm_elementwise",
            "asm, constraints, arguments, dtype=, is_pure=, pack=",
        ),
    ),
    _row(
        "debug_barrier",
        "no thread reads slots before the acquire of thread 0",
        "the language has a barrier for all programs, not for debugging",
        Accepts(f"{_LANGUAGE}.debug_barrier", ""),
    ),
    _row(
        "memory",
        "slots, outputs and words of an arrival",
        "",
        Accepts(f"{_LANGUAGE}.load", "pointer, mask=, other=, cache_modifier="),
        Accepts(f"{_LANGUAGE}.store", "pointer, value, mask="),
    ),
    _row(
        "arithmetic and control",
        "the numerical contract: divisions and roots round to nearest",
        "",
        Accepts(f"{_LANGUAGE}.arange", "start, end"),
        Accepts(f"{_LANGUAGE}.program_id", "axis"),
        Accepts(f"{_LANGUAGE}.static_range.__init__", "self, first, end"),
        Accepts(f"{_LANGUAGE}.where", "condition, x, y"),
        Accepts(f"{_LANGUAGE}.minimum", "x, y"),
        Accepts(f"{_LANGUAGE}.max", "x, axis="),
        Accepts(f"{_LANGUAGE}.sum", "x, axis="),
        Accepts(f"{_LANGUAGE}.div_rn", "x, y"),
        Accepts(f"{_LANGUAGE}.sqrt_rn", "x"),
    ),
    _row(
        "types",
        "exact widening and narrowing, also by bits",
        "",
        *(There(f"{_LANGUAGE}.{name}") for name in _TYPES),
        There(f"{_LANGUAGE}.constexpr"),
        Has(f"{_LANGUAGE}.tensor", ("dtype",)),
        Has(f"{_LANGUAGE}.pointer_type", ("element_ty",)),
        Accepts(f"{_LANGUAGE}.tensor.to", "self, dtype, bitcast="),
    ),
    _row(
        "launch options",
        "warps of a row; no fused multiply-add: the contract rounds twice",
        "",
        Has("triton.backends.nvidia.compiler.CUDAOptions", ("enable_fp_fusion", "num_warps")),
    ),
    _row(
        "pointer arguments",
        "pinned host memory is an argument: the launcher asks data_ptr(), then the driver for the "
        "device pointer",
        "",
        Says(
            "file:triton/backends/nvidia/driver.*",
            (
                "PyObject_CallMethodNoArgs(obj, data_ptr_str)",
                "CU_POINTER_ATTRIBUTE_DEVICE_POINTER",
            ),
        ),
    ),
    _row(
        "ahead-of-time compilation",
        "tests compile every kernel for several GPUs, without a GPU",
        "",
        Accepts("triton.compile", "source, target=, options="),
        Accepts("triton.compiler.ASTSource.__init__", "self, fn, signature, constants, attributes"),
        Has("triton.backends.compiler.GPUTarget", ("arch", "backend", "warp_size")),
    ),
)
