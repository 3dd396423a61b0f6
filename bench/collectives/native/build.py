"""Compiles the native peers on this machine, once: they want its instruction set and its MPI."""

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
    """A native peer cannot be built here; says why."""


def find_tool(name: str) -> str | None:
    """A program of this Python environment, or else of the PATH."""
    beside = Path(sys.prefix) / "bin" / name
    return str(beside) if os.access(beside, os.X_OK) else shutil.which(name)


def build(source: str, compiler: str | None, libraries: Sequence[str] = ()) -> Path:
    """The executable of ``source``; compiled when the cache has none of the same text and compiler.

    ``libraries`` are further arguments of the compiler. Raises BuildError when there is no compiler
    or it rejects the source.
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
        output.rename(target)  # whole or not at all, also with two benchmarks at a time
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
