"""A pytest plugin: measured lines are kept with the test that ran them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from coverage import Coverage

TEST = "R2SERVE_TEST"
"""Environment variable that tells processes of a test which one it is."""


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
