"""The guest's rails and their switches."""

from __future__ import annotations

import subprocess
from pathlib import Path

_SCRIPT = Path(__file__).resolve().parent.parent / "rails.sh"


def rails(*words: str) -> None:
    """Do something to a rail, and wait until it is done."""
    subprocess.run([_SCRIPT, *words], check=True)
