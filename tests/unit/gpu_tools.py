"""Loads the scripts of tests/gpu as modules, for several tests."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests/gpu"
sys.path.append(str(FOLDER))  # last on the path, because the scripts have common names
import check  # noqa: E402
import install  # noqa: E402
import kit  # noqa: E402
import stages  # noqa: E402
import stepper  # noqa: E402

__all__ = ["FOLDER", "ROOT", "check", "install", "kit", "runs", "stages", "stepper"]


def runs(pid: int) -> bool:
    """Returns whether the process lives; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
