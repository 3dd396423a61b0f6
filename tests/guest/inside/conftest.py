"""Tests inside the guest: two nodes with three Soft-RoCE rails each (see ../guest.py)."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from ranks import Job

REPORT: list[str] = []
BEGAN = time.monotonic()


@pytest.hookimpl(trylast=True)  # runs after deselection
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sorts tests without ranks to the front, because torch loads in a thread meanwhile."""

    def needs_ranks(item: pytest.Item) -> bool:
        return not {"job", "new_job"}.isdisjoint(getattr(item, "fixturenames", ()))

    items.sort(key=needs_ranks)
    if any(map(needs_ranks, items)) and not config.option.collectonly:
        threading.Thread(target=importlib.import_module, args=["ranks"]).start()


@pytest.fixture(scope="session", autouse=True)
def _in_the_guest() -> None:
    if not Path("/sys/class/infiniband/rxe_n1r2").exists():
        pytest.exit("these tests run inside the guest: make test-guest", returncode=3)


@pytest.fixture(scope="session")
def _jobs() -> Iterator[list[Job]]:
    made: list[Job] = []
    yield made
    for job in made:
        job.stop()


@pytest.fixture(scope="session")
def new_job() -> type[Job]:
    from ranks import Job

    return Job


@pytest.fixture
def job(_jobs: list[Job], new_job: type[Job]) -> Iterator[Job]:
    """Two ranks over all three rails, shared by all tests while the ranks are alive."""
    if not _jobs or not _jobs[-1].is_alive():
        _jobs.append(
            new_job(rails_of=lambda rank: ",".join(f"n{rank}r{rail}" for rail in range(3)))
        )
    made = _jobs[-1]
    made.await_up()
    with made.over_verbs():
        yield made


@pytest.fixture
def alone(_jobs: list[Job]) -> None:
    """Stops all shared jobs, so that the test runs alone."""
    while _jobs:
        _jobs.pop().stop()


@pytest.fixture
def show() -> Callable[[str], None]:
    """Adds a line to the report at the end of the run."""
    return REPORT.append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("measured")
    seconds = time.monotonic() - BEGAN
    for line in [*REPORT, f"{seconds:.0f} s in total by the guest's clock (goal: at most 480 s)"]:
        terminalreporter.write_line(line)
