"""Speed and stalls, as ratios within one run: the guest is 10 to 20 times slower than its host."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable

import pytest
from ranks import Job, rails

KIB = 1024


def bare_ping_pong(size: int) -> float:
    """A two-way RDMA WRITE of perftest, in us: it reports half of it."""
    words = ["ib_write_lat", "-x", "1", "-s", str(size), "-n", "200", "-F"]
    with subprocess.Popen(
        [*words, "-d", "rxe_n1r0"], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    ) as server:
        time.sleep(1.5)
        done = subprocess.run(
            [*words, "-d", "rxe_n0r0", "10.0.0.2"], capture_output=True, text=True, timeout=60
        )
        server.wait(30)
    rows = [line.split() for line in done.stdout.splitlines()]
    [row] = [row for row in rows if row[:1] == [str(size)]]
    return 2 * float(row[4])  # t_typical


def one_rail(**config: object) -> Job:
    return Job(rails_of=lambda rank: f"n{rank}r0", **config)


@pytest.mark.parametrize("size", [4 * KIB, 16 * KIB, 64 * KIB])
def test_an_all_reduce_beside_a_bare_ping_pong(show: Callable[[str], None], size: int) -> None:
    bare = bare_ping_pong(size)
    took = {}
    for kind, rdma in (("verbs", "require"), ("TCP", "off")):
        job = one_rail(rdma=rdma)
        took[kind] = statistics.median(job.ask("times", elements=size // 4, count=100)[0])
        kinds = {rail["kind"] for rail in job.ranks[0].ask("rails")}
        assert kinds == {"verbs" if kind == "verbs" else "tcp"}
        job.stop()
    show(
        f"all_reduce of {size // KIB} KiB: verbs {took['verbs']:.0f} us, TCP {took['TCP']:.0f} us, "
        f"bare two-way RDMA WRITE {bare:.0f} us: {took['verbs'] / bare:.2f} x (wanted 1.5)"
    )


def test_two_rails_beside_one(show: Callable[[str], None]) -> None:
    took = {}
    for rails_used in (1, 2):
        job = Job(rails_of=lambda rank, n=rails_used: ",".join(f"n{rank}r{i}" for i in range(n)))
        took[rails_used] = statistics.median(job.ask("times", elements=1024 * KIB, count=4)[0])
        assert all(carried > 0 for carried in job.carried().values())
        job.stop()
    show(
        f"all_reduce of 4 MiB: one rail {took[1] / 1e3:.0f} ms, two {took[2] / 1e3:.0f} ms: "
        f"{took[1] / took[2]:.2f} x (wanted 1.5; Soft-RoCE's work is the processors')"
    )


def test_retries_of_a_bare_queue_pair(show: Callable[[str], None]) -> None:
    """What finding a dead path takes where nothing but the queue pair's own retries finds it."""
    job = one_rail(dead_deadline_ms=60_000, ack_deadline_floor_ms=60_000, probe_interval_ms=50)
    before = time.monotonic_ns()
    rails("mute", "n0r0")
    job.eventually("rail0 DOWN", lambda: (0, "rail0", "completion-error") in job.moves())
    [event] = [e for e in job.ranks[0].ask("events") if "->DOWN completion" in e["text"]]
    show(
        f"retries exhausted after {(event['time_ns'] - before) / 1e6:.0f} ms at timeout 14, "
        "retry_cnt 6; computed for timeout 20, retry_cnt 7 (NCCL's defaults): 34 s"
    )
    rails("unmute", "n0r0")
    job.await_up()
    job.stop()
