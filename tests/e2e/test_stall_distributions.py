"""200 real faults of each kind; the test prints the stalls, and only asserts their number."""

from __future__ import annotations

from collections import Counter

import pytest
from rich.console import Console

from r2serve.bench.collectives.stall_distributions import KINDS, run, show
from r2serve.lab.holder import LabUnavailableError

FAULTS = 200
OF_MPTCP = 10


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
