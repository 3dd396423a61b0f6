"""Kernels compile without a GPU, to the instructions required by the numerical contract."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("compile_all.py")
# A100, H100 and H200, B200
ARCHITECTURES = (80, 90, pytest.param(100, marks=pytest.mark.long))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(request.param)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    for one in found.values():
        one["arch"] = request.param
    return found


@pytest.mark.slow
def test_compiled_kernels_keep_the_contract(compiled: dict[str, dict[str, Any]]) -> None:
    """A subprocess compiles all kernels of an architecture, so a single test checks all kernels."""
    for name, kernel in compiled.items():
        operations = kernel["operations"]
        assert kernel["stack_bytes"] == 0, name
        # Denormals are kept, and operations with two roundings are not fused.
        assert not [one for one in operations if ".ftz" in one or "approx" in one], name
        assert not [one for one in operations if one.startswith("fma.rn.f32")], name
        # Other devices write slots: no read may use the non-coherent cache (.nc).
        assert not [one for one in operations if ".nc" in one], name

    waits = [name for name, kernel in compiled.items() if "ld.acquire.sys" in kernel["ptx"]]
    assert "arrival" in waits
    assert "reduce_chunks bf16 x2" in waits
    assert "reduce_chunks f32 x16 behind" not in waits
    assert not [name for name in compiled if "odd" in name and name in waits]
    for kernel in compiled.values():
        assert not [one for one in kernel["operations"] if one.startswith(("atom.", "red."))]

    def slot_loads(name: str) -> dict[str, int]:
        operations: dict[str, int] = compiled[name]["operations"]
        return {one: n for one, n in operations.items() if one.startswith("ld.global.cg")}

    # 16 bytes per load.  A thread has 8 elements of each slot in reduce_chunks, 16 in the norm.
    assert slot_loads("reduce_chunks bf16 x2") == {"ld.global.cg.v4.b32": 2}
    assert slot_loads("reduce_add_rms_norm bf16 x8 8192") == {"ld.global.cg.v4.b32": 16}

    native = compiled["quantize_chunks fp8"]
    converts = [one for one in native["operations"] if "e4m3x2" in one]
    assert converts == ([] if native["arch"] < 89 else ["cvt.rn.satfinite.e4m3x2.f32"])
