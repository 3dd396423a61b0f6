"""What a reader of docs/operations.md types instead of the flag has the effect of the flag."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from r2serve.engines import flag, sidecar
from r2serve.engines.vllm import carried

PAGE = (Path(__file__).resolve().parents[2] / "docs/operations.md").read_text()


def test_the_documented_additional_config_chooses_r2ccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(flag.VARIABLE, raising=False)
    (written,) = re.findall(r"additional_config=(\{[^`]*\}\})\)`", PAGE)
    carried.read_additional_config(json.loads(written))
    assert flag.active()


def test_the_documented_variables_are_those_of_the_flags() -> None:
    assert f"`{flag.VARIABLE}=r2ccl`" in PAGE
    assert f"`{sidecar.VARIABLE}=[HOST:]PORT`" in PAGE
