"""The cost of idle relays, and new groups in a row without the management NIC."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from r2serve.bench.control.jobs import Job, lab_of, talk

IDLE_CPU_PERCENT = 0.2
"""Limit of an idle relay, in percent of a core."""
IDLE_MB = 20.0
STARTED = "up"
"""Line to a relay: the engine has started, so new listeners are rare."""
QUIET_S = 10.0
"""Time between this line and the measurement."""
GROUPS = 200
GROUPS_S = 900.0
NICS_OF_GROUPS = 3


def idle(nics: int, seconds: float, work: Path, watch: Callable[[str], None]) -> dict[str, Any]:
    """Returns CPU time and memory of idle relays, by node.

    Raises:
        ControlError: a relay did not start.
        LabUnavailableError, LabCommandError: the lab failed.
    """
    with lab_of(nics) as lab, Job(lab, work, ()) as job:
        job.settle()
        for program in job.programs:
            program.say(STARTED)
        time.sleep(QUIET_S)
        relays = [job.relay(node) for node in (0, 1)]
        before = [_cpu_s(relay) for relay in relays]
        begun = time.monotonic()
        time.sleep(seconds)
        span_s = time.monotonic() - begun
        used = [_cpu_s(relay) - then for relay, then in zip(relays, before, strict=True)]
        nodes = [_node(each, spent / span_s) for each, spent in zip(relays, used, strict=True)]
    watch(f"{nics} NICs, idle relays: {_said(nodes)}")
    return {"nics": nics, "seconds": round(span_s, 2), "nodes": nodes, "met": is_cheap(nodes)}


def _cpu_s(relay: psutil.Process) -> float:
    times = relay.cpu_times()
    return float(times.user + times.system)


def _node(relay: psutil.Process, cores: float) -> dict[str, float]:
    memory = relay.memory_full_info()
    return {
        "cpu_percent": round(cores * 100, 3),
        "threads": relay.num_threads(),
        "rss_mb": round(memory.rss / 1e6, 1),
        "pss_mb": round(memory.pss / 1e6, 1),
        "uss_mb": round(memory.uss / 1e6, 1),
    }


def is_cheap(nodes: Sequence[dict[str, float]]) -> bool:
    """Whether all relays keep both limits; memory is the resident size, shared pages included."""
    return all(
        each["cpu_percent"] <= IDLE_CPU_PERCENT and each["rss_mb"] <= IDLE_MB for each in nodes
    )


def _said(nodes: Sequence[dict[str, float]]) -> str:
    return "; ".join(
        f"{each['cpu_percent']:.2f} % of a core, {each['rss_mb']:.0f} MB resident, "
        f"{each['uss_mb']:.0f} MB of its own"
        for each in nodes
    )


def groups(work: Path, watch: Callable[[str], None], count: int = GROUPS) -> dict[str, Any]:
    """Makes gloo groups in a row while both management NICs have no carrier."""
    with lab_of(NICS_OF_GROUPS) as lab, Job(lab, work, talk("groups", str(count))) as job:
        job.settle()
        for node in (0, 1):
            lab.cut(node, None)
        begun = time.monotonic()
        job.programs[0].say("go")
        found = job.programs[0].hear("groups", GROUPS_S)
        took_s = time.monotonic() - begun
        statuses = [program.ended_within(60.0) for program in job.programs]
    watch(f"{found['groups']} new groups in {took_s:.1f} s, the slowest in {found['worst']:.0f} ms")
    return {
        "groups": found["groups"],
        "seconds": round(took_s, 2),
        "ms": {name: found[name] for name in ("p50", "p99", "worst")},
        "statuses": statuses,
        "met": found["groups"] == count and statuses == [0, 0],
    }
