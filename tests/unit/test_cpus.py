"""CPUs of background threads, when an engine pins the thread that makes the communicator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

from r2serve import cpus

PINNED = """
import json, os, sys, threading
import r2serve

def names():
    found = {}
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/comm") as file:
            found[int(task)] = file.read().strip()
    return found

def make():
    os.sched_setaffinity(0, {int(sys.argv[2])})
    before = names()
    from r2serve.config import Config
    from r2serve.process import acquire, release
    process = acquire(Config.from_env(), 0, None, share=True)
    python = {thread.native_id for thread in threading.enumerate()}
    own = {
        name: sorted(os.sched_getaffinity(task))
        for task, name in names().items()
        if task not in before and task not in python
    }
    print(json.dumps(own))
    release(process)

if sys.argv[1] == "main":
    make()
else:
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
"""


def threads_of(maker: str, cpu: int, extra: Mapping[str, str]) -> dict[str, list[int]]:
    """Returns the CPUs of the core's threads, if thread ``maker`` is pinned to ``cpu``."""
    ran = subprocess.run(
        [sys.executable, "-c", PINNED, maker, str(cpu)],
        env={**os.environ, "R2CCL_RAILS": "127.0.0.1", **extra},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, list[int]] = json.loads(ran.stdout)
    return found


@pytest.mark.case("29", "the core's threads stayed on the CPU of the thread that computes")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
@pytest.mark.parametrize("maker", ["main", "other"])
def test_the_threads_of_the_core_have_the_cpus_of_the_start(maker: str) -> None:
    own = sorted(os.sched_getaffinity(0))
    assert threads_of(maker, own[0], {}) == {"r2ccl-progress": own}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
def test_an_option_pins_the_threads_of_the_core() -> None:
    first, second, *_ = sorted(os.sched_getaffinity(0))
    pinned = threads_of("main", first, {"R2CCL_BACKGROUND_CPUS": str(second)})
    assert pinned == {"r2ccl-progress": [second]}


CHILD = """
import multiprocessing, os, sys

def child():
    from r2serve import cpus
    print(cpus.shown(cpus.at_start()))

if __name__ == "__main__":
    from r2serve import cpus
    cpus.hand_down()
    cpu = min(cpus.at_start())
    method = sys.argv[1]
    if method == "fork":
        os.sched_setaffinity(0, {cpu})
    else:  # as an OpenMP runtime in the child, before r2serve
        os.environ["OMP_PROC_BIND"] = "true"
        os.sched_setaffinity(0, {cpu})
    worker = multiprocessing.get_context(method).Process(target=child)
    worker.start()
    worker.join()
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
def test_a_child_pinned_by_an_openmp_runtime_has_the_cpus_of_its_parent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]
) -> None:
    for name in (*cpus.PINNING, cpus.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    script = os.path.join(tmp_path, "child.py")
    with open(script, "w", encoding="utf-8") as file:
        file.write(CHILD)
    own = os.sched_getaffinity(0)
    found = {}
    for method in ("fork", "spawn"):
        ran = subprocess.run(
            [sys.executable, script, method],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        found[method] = ran.stdout.strip()
    assert found == {"fork": str(min(own)), "spawn": cpus.shown(own)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", {0}),
        ("0-3,8", {0, 1, 2, 3, 8}),
        ("8191", {8191}),
        ("8192", None),
        ("", None),
        ("1-", None),
        ("3-1", None),
        ("0, 1", None),
        ("٣", None),
    ],
)
def test_a_list_of_cpus(text: str, expected: set[int] | None) -> None:
    assert cpus.parsed(text) == expected
    if expected is not None:
        assert cpus.shown(expected) == text
