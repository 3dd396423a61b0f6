"""Brings the rails of r2ccl's workers into the measured state.

A lost rail is a rail of rank 0, lost to all peers. r2ccl starts with all rails UP. Fault injection
then takes the rail down like a lost carrier, and measuring begins when the rail is out of use.
Contenders without fault injection start on the remaining rails (see contenders.py).
"""

from __future__ import annotations

from r2serve.bench.collectives.control import WorkerError, WorkerGroup
from r2serve.bench.collectives.matrix import CollectiveCall, Setting
from r2serve.bench.collectives.strikes import LOOK_S, rails_of, soak
from r2serve.lab.rails import wait_until

SLOW_BYTES_PER_S = 100_000_000
TIMEOUT_S = 20.0
# Traffic before measuring: r2ccl needs 1 s of traffic to report a slow rail.
SETTLE_MS = 2000
SETTLE = CollectiveCall("all_reduce", 1 << 20, "float32")


def make(group: WorkerGroup, setting: Setting) -> None:
    """Brings r2ccl's workers into the state. Raises WorkerError when a rail stays up."""
    if setting.state == "slow":
        _settle(group)  # gives r2ccl rates of the healthy rails for comparison
        group.ask_one(0, f"fault 0 slow {SLOW_BYTES_PER_S}", "ok")
        _settle(group)
    for rail in range(setting.lost):
        group.ask_one(0, f"fault {rail} cut 0", "ok")
    if setting.lost:
        _wait_until_lost(group, set(range(setting.lost)))


def _settle(group: WorkerGroup) -> None:
    group.prepare(SETTLE.request("auto"))
    soak(group, SETTLE_MS)


def _wait_until_lost(group: WorkerGroup, lost: set[int]) -> None:
    """Waits until exactly the ``lost`` rails of rank 0 are out of use."""
    states: list[tuple[int, bool]] = []

    def reached() -> bool:
        states[:] = [(index, state == "UP") for index, state, _ in rails_of(group)[0]]
        return all(up is (index not in lost) for index, up in states)

    if not wait_until(reached, TIMEOUT_S, LOOK_S):
        raise WorkerError(f"rails {sorted(lost)} of rank 0 should be lost, not {states}")
