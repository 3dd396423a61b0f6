"""Labs for tests with SGLang's servers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from served_stage import Stage, a_stage
from sglang_environment import BIN, python

from r2serve.lab.holder import LabUnavailableError
from r2serve.lab.lab import Lab


@pytest.fixture(scope="module")
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    try:
        python()
    except FileNotFoundError as error:
        if request.config.getoption("--cases"):  # a case has tests of vLLM, too
            pytest.skip(str(error))
        raise
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{BIN}:{before}"
    with ExitStack() as stack:
        stack.callback(os.environ.__setitem__, "PATH", before)
        yield stack.enter_context(a_stage("sglang"))


@pytest.fixture
def machine_with_a_lab() -> None:
    """Skips a test whose command makes its own labs, where none can be made."""
    try:
        with Lab(nodes=1, rails=1):
            return
    except LabUnavailableError as error:
        pytest.skip(f"no lab on this machine: {error}")
