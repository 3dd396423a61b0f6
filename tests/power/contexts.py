"""pytest plugin: records each measured line together with the test running it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from coverage import Coverage

TEST = "R2SERVE_TEST"
"""Environment variable with the current test's node id, for processes started by the test."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    test = item.nodeid.partition("[")[0]
    measured = Coverage.current()
    os.environ[TEST] = test
    if measured is not None:
        measured.switch_context(test)
    try:
        return (yield)
    finally:
        del os.environ[TEST]
        if measured is not None:
            measured.switch_context("")
