"""Runs kernels under Triton's interpreter on CPU tensors, unless the machine has a GPU.

Triton reads TRITON_INTERPRET at ``@triton.jit``.  The variable is set only during the import of the
kernels and during kernel tests: subprocesses of other tests in the same run must not inherit
TRITON_INTERPRET.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

INTERPRET = os.environ.get("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1") == "1"
KERNELS = Path(__file__).resolve().parents[2] / "kernels"

if INTERPRET and os.environ.get("R2SERVE_TEST_ON_GPU") == "1":
    right = "right: TRITON_INTERPRET unset, and a torch that sees the GPU"
    raise RuntimeError(f"kernels would be interpreted on a machine with a GPU; {right}")


def interpret_the_language() -> None:
    """Replaces the jitted functions of Triton's library (such as tl.sum) by interpreted functions.

    An earlier import of Triton, for example by vLLM, has prepared these functions for compilation.
    Interpreted kernels call the functions directly.
    """
    for module in (triton.language, triton.language.standard):
        for name, value in vars(module).items():
            if isinstance(value, JITFunction):
                setattr(module, name, InterpretedFunction(value.fn))


def import_kernels() -> None:
    for name in [name for name in sys.modules if name.startswith("r2serve.kernels.")]:
        del sys.modules[name]  # imported earlier by other tests, with compiled functions
    for path in sorted(KERNELS.glob("*.py")):
        if path.stem != "__init__":
            importlib.import_module(f"r2serve.kernels.{path.stem}")


if INTERPRET:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        interpret_the_language()
        import_kernels()


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_INTERPRET", "1" if INTERPRET else "0")
    with np.errstate(all="ignore"):  # numpy under the interpreter warns of inf - inf
        yield
