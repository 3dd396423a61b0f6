"""Where MPICH is: not among this environment's programs, whose mpirun and mpicxx are Open MPI's.

Both wheels bring programs and headers of the same names, so MPICH is installed under a prefix of
its own: ``pip install --prefix PREFIX mpich``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

MPICH_VARIABLE = "R2SERVE_BENCH_MPICH"


def mpich_prefix() -> Path:
    """What the variable says, else ``mpich`` in this Python environment."""
    given = os.environ.get(MPICH_VARIABLE)
    return Path(given) if given else Path(sys.prefix) / "mpich"


def mpich_tool(name: str) -> str | None:
    """``mpiexec`` or ``mpicxx`` of the prefix, or else as Debian names it on the PATH."""
    own = mpich_prefix() / "bin" / name
    if os.access(own, os.X_OK):
        return str(own)
    return None if MPICH_VARIABLE in os.environ else shutil.which(f"{name}.mpich")


def mpich_version() -> str | None:
    """The version of the MPICH that is found, None where there is none."""
    mpiexec = mpich_tool("mpiexec")
    if mpiexec is None:
        return None
    done = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "Version":
            return value.strip()
    return None
