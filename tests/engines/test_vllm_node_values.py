"""`vllm serve` on two nodes of a lab whose command lines or options differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from differing import DIFFERENCES, WITH, WITHOUT, check_end
from tiny_moe import make_tiny_moe

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


DIRECT = WITH | {"settings": {"R2CCL_CONTROL": "direct"}}
ON_NODE_1 = DIFFERENCES["the flag on node 1"]
OF_REPLICAS = {
    "the flag on node 1": ON_NODE_1,
    "the flag on node 1, with other addresses of the meeting": (
        (WITHOUT, ELSEWHERE),
        *ON_NODE_1[1:],
    ),
    "the relay on node 1": ((DIRECT, WITH), "control (R2CCL_CONTROL)", ("direct", "rails")),
}
"""Differences of the nodes of a data-parallel engine, of which node 0 has no relay."""


@pytest.fixture
def lab() -> Iterator[Lab]:
    try:
        with Lab(nodes=2, rails=2) as made:
            yield made
    except LabUnavailableError as error:
        pytest.skip(f"no lab on this machine: {error}")


@pytest.fixture
def work() -> Iterator[Path]:
    with TemporaryDirectory(prefix="r2s-") as folder:
        yield Path(folder)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.case("22", "the nodes waited for each other, and named no value")
@pytest.mark.parametrize("difference", OF_VLLM)
def test_nodes_that_differ_end_and_say_so(lab: Lab, work: Path, difference: str) -> None:
    model = make_tiny_llama(work / "model")
    plan = Plan("nodes", model, r2ccl=True, lab=True, work=work, max_requests=4)
    check_end(lab, plan, *OF_VLLM[difference])


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.case("22", "node 0 was not told, and waited for the engine of node 1")
@pytest.mark.parametrize(
    ("model", "difference"),
    [
        *((make_tiny_llama, difference) for difference in OF_REPLICAS),
        (make_tiny_moe, "the flag on node 1"),
    ],
)
def test_a_node_0_without_a_relay_ends_with_the_nodes_that_have_one(
    lab: Lab, work: Path, model: Callable[[Path], Path], difference: str
) -> None:
    plan = Plan(
        "replicas",
        model(work / "model"),
        r2ccl=True,
        lab=True,
        work=work,
        max_requests=4,
        tensor_parallel=1,
        data_parallel=2,
    )
    check_end(lab, plan, *OF_REPLICAS[difference])
