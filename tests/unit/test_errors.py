"""Every error code of the core has an error class."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import r2serve
from r2serve.errors import (
    ERROR_TYPES,
    ConfigError,
    InvalidArgumentError,
    R2cclError,
    StartupTimeoutError,
)

HEADER = Path(__file__).resolve().parents[2] / "csrc/base/errors.hpp"


def test_every_code_of_the_core_has_its_class() -> None:
    body = re.search(r"enum class ErrorCode[^{]*\{(.*?)\};", HEADER.read_text(), re.DOTALL)
    assert body is not None
    codes = re.findall(r"^\s*(\w+),", body[1], re.MULTILINE)
    assert codes[0] == "ok"
    assert set(codes[1:]) == set(ERROR_TYPES)
    assert len(set(ERROR_TYPES.values())) == len(ERROR_TYPES)


@pytest.mark.parametrize("kind", ERROR_TYPES.values())
def test_one_base_catches_all(kind: type[R2cclError]) -> None:
    assert issubclass(kind, r2serve.R2cclError)
    assert issubclass(kind, RuntimeError)
    assert kind.__doc__


def test_builtin_bases() -> None:
    assert issubclass(InvalidArgumentError, ValueError)
    assert issubclass(StartupTimeoutError, TimeoutError)
    assert issubclass(ConfigError, ValueError)
    assert not issubclass(ConfigError, R2cclError)


def test_the_core_raises_its_errors_without_other_imports() -> None:
    ask = "from r2serve import _core; _core.gpus('libnone.so')"
    asked = subprocess.run(
        [sys.executable, "-c", ask], capture_output=True, text=True, timeout=300, check=False
    )
    last = asked.stderr.splitlines()[-1]
    assert last.startswith("r2serve.errors.InternalError: no CUDA driver: libnone.so")
