"""Finds MPICH, installed under a separate prefix: ``pip install --prefix PREFIX mpich``.

The wheels of MPICH and Open MPI contain programs and headers of the same names (mpirun, mpicxx,
mpi.h). The programs of this Python environment are Open MPI's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

MPICH_VARIABLE = "R2SERVE_BENCH_MPICH"


def mpich_prefix() -> Path:
    """Returns $R2SERVE_BENCH_MPICH, else ``mpich`` in this Python environment."""
    given = os.environ.get(MPICH_VARIABLE)
    return Path(given) if given else Path(sys.prefix) / "mpich"


def mpich_tool(name: str) -> str | None:
    """Returns ``mpiexec`` or ``mpicxx`` of the prefix, else Debian's program (``NAME.mpich``)."""
    own = mpich_prefix() / "bin" / name
    if os.access(own, os.X_OK):
        return str(own)
    return None if MPICH_VARIABLE in os.environ else shutil.which(f"{name}.mpich")


def mpich_version() -> str | None:
    """Returns the version of the MPICH found, None without MPICH."""
    mpiexec = mpich_tool("mpiexec")
    if mpiexec is None:
        return None
    done = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "Version":
            return value.strip()
    return None
