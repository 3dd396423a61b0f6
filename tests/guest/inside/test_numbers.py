"""Speed and stalls as ratios within a run, because the guest is 10 to 20 times slower than its
host.
"""

from __future__ import annotations

import math
import re
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from bare import connected_pair
from rails import rails

if TYPE_CHECKING:
    from ranks import Job

pytestmark = pytest.mark.usefixtures("alone")

KIB = 1024
LARGE = 4096 * KIB


def bare_ping_pong(size: int) -> float:
    """Returns the median of perftest's two-way RDMA WRITEs, in us (perftest reports half)."""
    words = ["ib_write_lat", "-x", "1", "-s", str(size), "-n", "200", "-F", "-H"]
    with subprocess.Popen(
        [*words, "-d", "rxe_n1r0"], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    ) as server:
        time.sleep(1.5)
        done = subprocess.run(
            [*words, "-d", "rxe_n0r0", "10.0.0.2"], capture_output=True, text=True, timeout=60
        )
        server.wait(30)
    halves = [float(half) for half in re.findall(r"^\d+, (\S+)$", done.stdout, re.MULTILINE)]
    assert len(halves) > 150, done.stdout
    return 2 * float(statistics.median(halves))


def median_us(job: Job, size: int, count: int) -> float:
    return statistics.median(job.ask("times", elements=size // 4, count=count)[0])


def test_all_reduce_against_bare_rdma_and_two_rails_against_a_single_rail(
    new_job: type[Job], show: Callable[[str], None]
) -> None:
    sizes = [4 * KIB, 16 * KIB, 64 * KIB]
    bare = {size: bare_ping_pong(size) for size in sizes}
    took = {}
    for kind, rdma in (("verbs", "require"), ("tcp", "off")):
        job = new_job(rails_of=lambda rank: f"n{rank}r0", rdma=rdma)
        took[kind] = {size: median_us(job, size, 60) for size in sizes}
        if kind == "verbs":
            alone = median_us(job, LARGE, 3)
        assert [set(sent) for sent in job.sent()] == [{kind}] * 2
        assert all(sent[kind] > 60 * sum(sizes) / 2 for sent in job.sent())
        job.stop()
    for size in sizes:
        verbs, tcp = took["verbs"][size], took["tcp"][size]
        # perftest has no usable clock in User-Mode Linux.
        beside = (
            f"bare two-way RDMA WRITE {bare[size]:.0f} us: {verbs / bare[size]:.2f} x (goal 1.5)"
            if math.isfinite(bare[size])
            else "bare two-way RDMA WRITE not measured"
        )
        show(f"all_reduce of {size // KIB} KiB: verbs {verbs:.0f} us, TCP {tcp:.0f} us, {beside}")
    job = new_job(rails_of=lambda rank: f"n{rank}r0,n{rank}r1")
    both = median_us(job, LARGE, 3)
    assert all(carried > 0 for rank in (0, 1) for carried in job.carried(rank).values())
    job.stop()
    show(
        f"all_reduce of 4 MiB: one rail {alone / 1e3:.0f} ms, two {both / 1e3:.0f} ms: "
        f"{alone / both:.2f} x (goal 1.5; Soft-RoCE runs on the CPU)"
    )


def test_retries_of_a_bare_queue_pair(show: Callable[[str], None]) -> None:
    """Measures the time to find a dead path by the retries of a queue pair alone."""
    near, far = connected_pair(timeout=14, retry_cnt=6)
    rails("mute", "n0r0")
    try:
        status, seconds = near.write(far)
    finally:
        rails("unmute", "n0r0")
    assert status == "IBV_WC_RETRY_EXC_ERR"
    show(
        f"a bare queue pair's retries are exhausted after {seconds * 1e3:.0f} ms at timeout 14, "
        "retry_cnt 6; computed for timeout 20, retry_cnt 7 (NCCL's defaults): 34 s"
    )
