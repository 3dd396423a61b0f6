"""`vllm serve` on two nodes of a lab whose command lines or options differ."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from differing import DIFFERENCES, WITH, WITHOUT, check_end

from r2serve.lab.holder import LabUnavailableError
from r2serve.lab.lab import Lab
from r2serve.lab.serving.model import make_tiny_llama
from r2serve.lab.serving.plan import Plan

ELSEWHERE = WITH | {"settings": {"R2CCL_CONTROL_MASTER": "10.77.1.1,10.77.2.1"}}
"""The relays meet over the rails, and not at --master-addr."""
OF_VLLM = DIFFERENCES | {
    "the flag on node 0, with other addresses of the meeting": (
        (ELSEWHERE, WITHOUT),
        *DIFFERENCES["the flag on node 0"][1:],
    ),
}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.case("22", "the nodes waited for each other, and named no value")
@pytest.mark.parametrize("difference", OF_VLLM)
def test_nodes_that_differ_end_and_say_so(difference: str) -> None:
    with ExitStack() as stack:
        work = Path(stack.enter_context(TemporaryDirectory(prefix="r2s-")))
        try:
            lab = stack.enter_context(Lab(nodes=2, rails=2))
        except LabUnavailableError as error:
            pytest.skip(f"no lab on this machine: {error}")
        model = make_tiny_llama(work / "model")
        plan = Plan("nodes", model, r2ccl=True, lab=True, work=work, max_requests=4)
        check_end(lab, plan, *OF_VLLM[difference])
