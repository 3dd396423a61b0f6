"""200 real faults of each kind; the tests print the stalls, and assert their number.

A black hole under ranks that compute on a pinned CPU also has a limit.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
from rich.console import Console
from timely import timely

from r2serve.bench.collectives.stall_distributions import (
    BLACK_HOLE,
    KINDS,
    P99_MS,
    Distribution,
    distributions,
    run,
    show,
)
from r2serve.lab.holder import LabUnavailableError

FAULTS = 200
OF_MPTCP = 10
COMPUTE_US = 2000


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_fault_has_a_stall(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        measured = run(FAULTS, OF_MPTCP, lambda line: None)
    except LabUnavailableError as error:
        pytest.skip(f"no lab on this machine: {error}")
    with capsys.disabled():
        show(measured, Console(width=110))
    counts = Counter((sample.system, sample.kind) for sample in measured.samples)
    wanted = {("r2ccl", kind): FAULTS for kind in KINDS}
    if not measured.skipped:
        wanted |= {("mptcp", kind): OF_MPTCP for kind in KINDS}
    assert counts == wanted
    assert all(sample.stall_ms > 0 and sample.no_fault_ms > 0 for sample in measured.samples)


def is_short(found: Distribution) -> bool:
    return found.stall_ms.p99 <= P99_MS[BLACK_HOLE]


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.case("29", "the core's threads shared the CPU of the thread that computes")
def test_a_black_hole_under_ranks_that_compute_on_a_pinned_cpu_is_short(
    capsys: pytest.CaptureFixture[str],
) -> None:
    try:
        measured = run(FAULTS, 0, lambda line: None, (BLACK_HOLE,), compute_us=COMPUTE_US)
    except LabUnavailableError as error:
        pytest.skip(f"no lab on this machine: {error}")
    with capsys.disabled():
        show(measured, Console(width=110))
    found = distributions(measured.samples)
    assert sum(one.faults for one in found) == FAULTS
    for one in found:
        timely(partial(is_short, one), f"{one.bytes} bytes: {one.stall_ms}", 0)
