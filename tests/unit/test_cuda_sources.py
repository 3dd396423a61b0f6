"""CUDA sources compile for every target, without a warning."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "csrc").rglob("*.cu"))
TARGETS = ("80", "90", "100")


@pytest.mark.parametrize("source", SOURCES, ids=[path.stem for path in SOURCES])
def test_compiles_for_every_target(source: Path, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    command = [nvcc, "-std=c++20", "-O3", "--fatbin", "-Werror", "all-warnings"]
    command += ["-Xcompiler", "-Wall,-Wextra", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'csrc/include'}"]
    for target in TARGETS:
        command += ["-gencode", f"arch=compute_{target},code=sm_{target}"]
    command += ["-gencode", f"arch=compute_{TARGETS[0]},code=compute_{TARGETS[0]}"]  # PTX
    made = tmp_path / "kernels.fatbin"
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
