"""Compilation and interpretation of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

# Whether kernels are interpreted.  Triton reads TRITON_INTERPRET when a kernel is decorated.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

# Launch option of every kernel.  A fused multiply-add rounds once, but the numerical contract
# rounds twice.
NO_FUSION = {"enable_fp_fusion": False}


def jit(function: Callable[..., Any]) -> Any:
    """Wraps ``triton.jit`` with a type annotation."""
    return triton.jit(function)
