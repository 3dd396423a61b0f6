"""Data-parallel training over two nodes with the backend r2ccl, under a carrier loss."""

from __future__ import annotations

import time
from typing import Any

import pytest

STEPS = 120
PAUSES = [STEPS // 3, STEPS // 2]  # steps after which the ranks wait for the test


def train(jobs: Any, lab: Any, backend: str, faults: bool) -> list[dict[str, Any]]:
    """Runs a training; returns the reports of both ranks.

    faults: rail 0 is cut during the steps between the pauses, and healed.
    """
    ranks = jobs.start(
        "training.py",
        2,
        config={"rails": "rail0,rail1", "node": "", "rejoin_backoff_max_ms": 200},
        nodes=lab.nodes,
        host=lab.nodes[0].management_address,
        backend=backend,
        steps=STEPS,
        pauses=PAUSES if faults else [],
    )
    for rank in ranks:
        rank.hear(60)
    for rank in ranks:
        rank.say({"go": True})
    if faults:
        for rank in ranks:
            assert rank.hear(120) == {"step": PAUSES[0]}
        for rank in ranks:
            rank.say({"go": True})
        time.sleep(0.1)  # longer than a step
        lab.cut(1, 0)
        for rank in ranks:
            assert rank.hear(120) == {"step": PAUSES[1]}
        time.sleep(1.0)
        for rank in ranks:
            rank.say({"go": True})
        lab.heal(1, 0)
    said = [rank.hear(300) for rank in ranks]
    for rank in ranks:
        rank.wait(60)
    return said


@pytest.mark.timeout(900)
def test_training_losses_are_bit_identical_through_a_carrier_loss(
    jobs, make_lab, show, monkeypatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mgmt0")
    lab = make_lab(2)
    undisturbed = train(jobs, lab, "r2ccl", faults=False)
    disturbed = train(jobs, lab, "r2ccl", faults=True)
    gloo = train(jobs, lab, "gloo", faults=False)
    assert undisturbed[0]["losses"] == undisturbed[1]["losses"]
    assert len(undisturbed[0]["losses"]) == STEPS
    assert undisturbed[0]["losses"][0] != undisturbed[0]["losses"][-1]
    assert [rank["rails_lost"] for rank in undisturbed] == [0, 0]
    for rank in disturbed:
        assert rank["losses"] == undisturbed[0]["losses"]
        assert rank["rails_lost"] >= 1
    median_s, total_s = undisturbed[0]["median_s"], undisturbed[0]["total_s"]
    show(
        f"step: {median_s * 1e3:.1f} ms, r2ccl / gloo {median_s / gloo[0]['median_s']:.2f}; "
        f"with / without a cut: all steps {disturbed[0]['total_s'] / total_s:.3f}, "
        f"worst {disturbed[0]['worst_s'] * 1e3:.0f} / {undisturbed[0]['worst_s'] * 1e3:.0f} ms"
    )
