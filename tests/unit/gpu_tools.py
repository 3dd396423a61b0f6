"""The scripts of tests/gpu as modules, which tests share."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests/gpu"
sys.path.append(str(FOLDER))  # behind all others: their names are common ones
import check  # noqa: E402
import install  # noqa: E402
import kit  # noqa: E402
import stages  # noqa: E402
import stepper  # noqa: E402

__all__ = ["FOLDER", "ROOT", "check", "install", "kit", "stages", "stepper"]
