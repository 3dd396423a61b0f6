"""`sglang serve` on two nodes of a lab whose command lines or options differ."""

from __future__ import annotations

import pytest
from differing import DIFFERENCES, check_end
from served_stage import STREAMS, Stage

from r2serve.lab.serving.plan import Plan


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.case("22", "the nodes waited for each other, and named no value")
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_nodes_that_differ_end_and_say_so(stage: Stage, difference: str) -> None:
    label = "nodes-" + difference.replace(" ", "-")
    plan = Plan(label, stage.model, True, True, stage.work, STREAMS, engine="sglang")
    check_end(stage.lab, plan, *DIFFERENCES[difference])
