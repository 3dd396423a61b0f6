"""`r2serve bench baseline`: an unoptimised core fails the check, and the normal core passes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from r2serve import _core

ROOT = Path(__file__).resolve().parents[2]
# Removes import finders of editable installations, because the finders precede PYTHONPATH.
SITE = """
import sys
sys.meta_path[:] = [each for each in sys.meta_path if "Editable" not in type(each).__name__
                    and "Redirecting" not in type(each).__name__]
"""
RUN = "import sys; from r2serve.cli import main; sys.argv[0] = 'r2serve'; main()"


def built_slow(folder: Path) -> Path:
    """Builds a core without compiler optimisation."""
    configure = ["cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja"]
    options = {"CMAKE_BUILD_TYPE": "Debug", "CMAKE_CXX_FLAGS_DEBUG": "-O0"}
    configure += [f"-D{name}={value}" for name, value in options.items()]
    configure.append(f"-DPython_EXECUTABLE={sys.executable}")
    for command in (configure, ["cmake", "--build", str(folder), "--target", "_core"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (core,) = folder.glob("_core*.so")
    return core


def package(folder: Path, core: Path) -> Path:
    """Creates a folder for PYTHONPATH with the sources of this checkout and ``core``."""
    inside = folder / "r2serve"
    inside.mkdir(parents=True)
    for part in (ROOT / "r2serve").iterdir():
        if part.name != "__pycache__" and part.suffix != ".so":
            (inside / part.name).symlink_to(part)
    for name in ("bench", "kernels"):
        (inside / name).symlink_to(ROOT / name)
    (inside / core.name).symlink_to(core)
    (folder / "sitecustomize.py").write_text(SITE)
    return folder


def baseline(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    effort = ["--sizes", "4KiB,16KiB", "--starts", "3", "--rounds", "20"]
    environment = {**os.environ, "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", RUN, "bench", "baseline", *arguments, *effort]
    return subprocess.run(
        command, env=environment, cwd=path, capture_output=True, text=True, check=False
    )


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_an_unoptimised_build_fails_the_check_and_a_normal_build_passes(tmp_path: Path) -> None:
    normal = package(tmp_path / "normal", Path(_core.__file__).resolve())
    slow = package(tmp_path / "slow", built_slow(tmp_path / "build"))
    file = str(tmp_path / "baseline.jsonl")
    written = baseline(normal, "--write", file)
    assert written.returncode == 0, written.stderr

    failed = baseline(slow, "--check", file)
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert "4 KiB: r2ccl / floor" in failed.stderr
    assert "slower than the limit" in failed.stderr

    passed = baseline(normal, "--check", file)
    assert passed.returncode == 0, passed.stdout + passed.stderr
