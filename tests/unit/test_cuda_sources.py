"""CUDA sources compile without a warning, and the core has the kernels in both forms."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from r2serve import _core

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "csrc").rglob("*.cu"))


@pytest.mark.parametrize("source", SOURCES, ids=[path.stem for path in SOURCES])
@pytest.mark.long  # the build of the core compiles the same source, with warnings as errors
def test_cuda_sources_compile_without_warnings(source: Path, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    command = [nvcc, "-std=c++20", "-O3", "-arch=compute_80", "--ptx", "-Werror", "all-warnings"]
    command += ["-Xcompiler", "-Wall,-Wextra", f"-I{ROOT / 'csrc'}"]
    made = tmp_path / "kernels.ptx"
    ran = subprocess.run(
        [*command, str(source), "-o", str(made)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert not ran.stderr.strip(), ran.stderr[-4000:]
    assert made.stat().st_size > 0


def test_there_are_sources() -> None:
    assert SOURCES


def test_the_core_has_the_kernels_as_binaries_and_as_ptx_for_old_drivers() -> None:
    if not _core.has_kernels():
        pytest.skip("no nvcc when r2serve was installed")
    core = Path(_core.__file__).read_bytes()
    assert b"\n.version 7.0\n.target sm_80\n" in core
    # The core has a device ELF image (EM_CUDA = 190) for each target known to the compiler.
    headers = [found.start() for found in re.finditer(rb"\x7fELF\x02", core)]
    images = [at for at in headers if core[at + 18 : at + 20] == b"\xbe\x00"]
    nvcc = shutil.which("nvcc")
    known = ["sm_80"]
    if nvcc is not None:
        listing = subprocess.run(
            [nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True
        )
        known = listing.stdout.split()
    assert len(images) >= len({"sm_80", "sm_90", "sm_100", "sm_120"} & set(known))
