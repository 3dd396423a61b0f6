"""The guest's rails and their switches."""

from __future__ import annotations

import subprocess
from pathlib import Path

_SCRIPT = Path(__file__).resolve().parent.parent / "rails.sh"


def rails(*words: str) -> None:
    """Applies a rails.sh command, and waits for its end."""
    subprocess.run([_SCRIPT, *words], check=True)
