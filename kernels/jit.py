"""How the kernels here are compiled, or interpreted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

# Whether kernels are interpreted: Triton decides it as they are decorated, by TRITON_INTERPRET.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

# Launch option of every kernel.  A fused multiply-add would round once where the contract says
# twice.
NO_FUSION = {"enable_fp_fusion": False}


def jit(function: Callable[..., Any]) -> Any:
    """``triton.jit``, with a type."""
    return triton.jit(function)
