"""The environment of SGLang for tests, made by `make setup-sglang`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / ".venv-sglang" / "bin"


def run(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs Python code in SGLang's environment, on CPUs.

    Raises:
        FileNotFoundError: the environment does not exist.
    """
    return subprocess.run(
        [str(python()), "-c", code, *arguments],
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1", **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def python() -> Path:
    """Returns the interpreter.

    Raises:
        FileNotFoundError: the environment does not exist.
    """
    found = BIN / "python"
    if not found.exists():
        raise FileNotFoundError(f"{found} does not exist: run make setup-sglang")
    return found
