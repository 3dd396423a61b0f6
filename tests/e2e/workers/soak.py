"""A rank of the soak: random collectives in two threads amid faults, forks, signals and limits.

Each thread has a communicator of its own. The first rank decides the end of both threads.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import itertools
import os
import resource
import signal
import threading
import time
import traceback
from typing import Any

import torch
from parent import ARGUMENTS, resources, say
from random_collectives import GROUPS, ME, NODE_OF, SEED, Call, Faults
from random_plan import make_step

from r2serve import Communicator

SECONDS = ARGUMENTS["seconds"]
SIGNAL_EVERY_S = 0.005
STEPS_PER_LOOK = 20
WARM_ELEMENTS = 12 << 20
M_ARENA_MAX = -8  # <malloc.h>


class Worker(threading.Thread):
    """Runs the calls of a communicator until the first rank says stop."""

    def __init__(self, communicator: Communicator, which: int) -> None:
        super().__init__(name=f"calls{which}")
        self.communicator, self.which = communicator, which
        self.calls = 0
        self.failed = ""
        self.ends_at = time.monotonic() + SECONDS

    def run(self) -> None:
        try:
            for number in itertools.count(self.which, 2):
                step = dataclasses.replace(make_step(SEED, number, GROUPS), group=self.which)
                members = GROUPS[self.which]
                Call(step, len(members), members.index(ME)).run(self.communicator)
                self.calls += 1
                if self.calls % STEPS_PER_LOOK == 0 and self.over():
                    return
        except Exception:  # noqa: BLE001 - reported by the main thread
            self.failed = traceback.format_exc()

    def over(self) -> bool:
        flag = torch.tensor([float(time.monotonic() >= self.ends_at)])
        return bool(self.communicator.broadcast(flag, GROUPS[self.which].index(0))[0])


def fork(foreign: int) -> bool:
    """Returns true if a child still has a descriptor that is not r2serve's."""
    child = os.fork()
    if child == 0:
        os._exit(0 if os.readlink(f"/proc/self/fd/{foreign}") == "/dev/null" else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def without_descriptors(seconds: float) -> None:
    """Sets the limit of descriptors to the next free one for a moment."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.dup(2)
    os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe, before[1]))
    try:
        time.sleep(seconds)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def settled(communicators: list[Communicator], limit: dict[str, int]) -> dict[str, int]:
    """Returns the resources with all rails UP, and free memory given back.

    Handshakes and probes of paths under way hold descriptors, so up to 30 s are granted until the
    counts are within ``limit``.
    """
    ends_at = time.monotonic() + 60
    while any(rail.state != "UP" for each in communicators for rail in each.rails()):
        if time.monotonic() > ends_at:
            raise TimeoutError(f"rails stay down: {communicators[0].rails()}")
        time.sleep(0.05)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    time.sleep(0.5)
    ends_at = time.monotonic() + 30
    found = resources()
    while time.monotonic() < ends_at and any(found[name] > most for name, most in limit.items()):
        time.sleep(0.5)
        found = resources()
    return found


def run(communicators: list[Communicator]) -> dict[str, Any]:
    """Runs both threads and the disturbances for a round."""
    foreign = os.open("/dev/null", os.O_RDONLY)
    workers = [Worker(communicator, which) for which, communicator in enumerate(communicators)]
    faults = Faults(communicators[0])
    done = {"forks": 0, "harmed": 0, "signals": 0, "limits": 0}

    def count(*_: object) -> None:
        done["signals"] += 1

    signal.signal(signal.SIGALRM, count)
    signal.setitimer(signal.ITIMER_REAL, SIGNAL_EVERY_S, SIGNAL_EVERY_S)
    for thread in (*workers, faults):
        thread.start()
    for turn in itertools.count():
        if not any(worker.is_alive() for worker in workers):
            break
        time.sleep(0.2)
        done["forks"] += 1
        done["harmed"] += not fork(foreign)
        if turn % 10 == 5 + ME:
            without_descriptors(0.3)
            done["limits"] += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    faults.over.set()
    for thread in (*workers, faults):
        thread.join()
    os.close(foreign)
    failed = [worker.failed for worker in workers if worker.failed]
    if failed:
        raise RuntimeError("\n".join(failed))
    return done | {"calls": sum(worker.calls for worker in workers), "faults": faults.injected}


def main() -> None:
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)  # arenas of threads would hide a leak
    communicators = [
        Communicator.standalone(
            ARGUMENTS["host"], port, members.index(ME), len(members), name=f"thread{which}"
        )
        for which, (members, port) in enumerate(zip(GROUPS, ARGUMENTS["ports"], strict=True))
    ]
    world = communicators[0]
    NODE_OF.extend(world.nodes)
    for communicator in communicators:  # touches all slots, whose memory is kept
        for _ in range(3):
            communicator.all_reduce(torch.zeros(WARM_ELEMENTS))
            communicator.all_to_all(torch.zeros(WARM_ELEMENTS - WARM_ELEMENTS % len(GROUPS[0])))
    limit: dict[str, int] = {}
    for _ in range(ARGUMENTS["rounds"]):  # the first rounds warm up
        done = run(communicators)
        world.barrier()
        done["resources"] = settled(communicators, limit)
        limit = {name: done["resources"][name] for name in ("threads", "descriptors")}
        done["rejoins"] = sum(rail.epoch - 1 for rail in world.rails())
        world.barrier()
        say(done)
    for communicator in communicators:
        communicator.close()


if __name__ == "__main__":
    try:
        main()
    except Exception:  # noqa: BLE001 - the test reports it
        say({"failed": traceback.format_exc()})
        os._exit(1)  # other ranks get the same error as after a death
