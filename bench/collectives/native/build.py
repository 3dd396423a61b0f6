"""Compiles the native contenders on this machine, for the local CPU and MPI, into a cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++20", "-O3", "-march=native")


class BuildError(RuntimeError):
    """A native contender cannot be built on this machine; the message gives the reason."""


def find_tool(name: str) -> str | None:
    """Returns the path of a program: in this Python environment, else in the PATH."""
    beside = Path(sys.prefix) / "bin" / name
    return str(beside) if os.access(beside, os.X_OK) else shutil.which(name)


def build(source: str, compiler: str | None, libraries: Sequence[str] = ()) -> Path:
    """Returns the executable of ``source``, from the cache or newly compiled.

    The cache key covers the sources, the compiler and the arguments. ``libraries`` are further
    compiler arguments. Raises BuildError without a compiler, or when the compilation fails.
    """
    if compiler is None:
        raise BuildError(f"no compiler for {source}")
    target = _cache() / f"{Path(source).stem}-{_fingerprint(source, compiler, libraries)}"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        output = Path(scratch) / target.name
        command = [compiler, *FLAGS, str(SOURCES / source), "-o", str(output), *libraries]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BuildError(f"{compiler} cannot compile {source}: {done.stderr.strip()[-400:]}")
        output.rename(target)  # atomic, even if two benchmarks build at the same time
    return target


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "r2serve" / "bench"


def _fingerprint(source: str, compiler: str, libraries: Sequence[str]) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    arguments = " ".join([*FLAGS, *libraries])
    digest = hashlib.sha256(b"\0".join([compiler.encode(), version, arguments.encode()]))
    for path in (SOURCES / source, *sorted(SOURCES.glob("*.hpp"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
