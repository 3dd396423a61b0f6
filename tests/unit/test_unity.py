"""The core compiles as a single file, so that any batches of a unity build compile.

Batches depend on the machine: without nvcc or libibverbs, CMake groups other files together.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror")
# CMake compiles a file with options of its own apart from every batch.
APART = ("_avx2.cc", "_avx512.cc")


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_all_files_of_the_core_compile_in_one_batch(tmp_path: Path) -> None:
    sources = [
        path
        for path in sorted((ROOT / "csrc").rglob("*.cc"))
        if path.parent.name != "bindings" and not path.name.endswith(APART)
    ]
    assert len(sources) > 50
    batch = tmp_path / "batch.cc"
    batch.write_text("".join(f'#include "{path}"\n' for path in sources))
    command = ["g++", "-fsyntax-only", "-std=c++20", f"-I{ROOT}/csrc", *WARNINGS, str(batch)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
