"""The states of the rails that collectives are measured in, and how each peer gets into one.

A lost rail is rank 0's, to all its peers. r2ccl loses it while it is up: its own fault injection
ends the rail as a lost carrier would, and the collectives are measured once it is out of use. The
peers that cannot lose a rail are started on those that are left (see contenders.py).
"""

from __future__ import annotations

import time

from r2serve.bench.collectives.control import WorkerError, WorkerGroup
from r2serve.bench.collectives.matrix import Setting, Workload
from r2serve.bench.collectives.strikes import rails_of, soak

SLOW_BYTES_PER_S = 100_000_000
TIMEOUT_S = 20.0
# Until r2ccl has noticed that a rail is slow: it takes a second to say so.
SETTLE_MS = 2000
SETTLE = Workload("all_reduce", 1 << 20, "float32")


def make(group: WorkerGroup, setting: Setting) -> None:
    """Brings the workers of r2ccl into the state. Raises WorkerError when a rail stays up."""
    if setting.state == "slow":
        _settle(group)  # there are rates to compare then
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
    """Until rank 0 has exactly the ``lost`` rails out of use."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        states = [(index, state == "UP") for index, state, _ in rails_of(group)[0]]
        if all(up is (index not in lost) for index, up in states):
            return
        if time.monotonic() > deadline:
            raise WorkerError(f"rails {sorted(lost)} of rank 0 should be lost, not {states}")
        time.sleep(0.05)
