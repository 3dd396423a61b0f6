"""The lab of SGLang's server tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from sglang_environment import BIN, python
from sglang_stage import Stage

from r2serve.lab.holder import LabUnavailableError
from r2serve.lab.lab import Lab


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    python()
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{BIN}:{before}"
    with ExitStack() as stack:
        stack.callback(os.environ.__setitem__, "PATH", before)
        # Sockets of the engine have long names, so the folder has a short one.
        work = Path(stack.enter_context(TemporaryDirectory(prefix="r2s-")))
        try:
            lab = stack.enter_context(Lab(nodes=2, rails=2))
        except LabUnavailableError as error:
            pytest.skip(f"no lab on this machine: {error}")
        yield Stage(lab, work)
