"""A rank that forks children while its rails carry collectives."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import torch
from parent import ARGUMENTS, hear, resources, say
from torch.utils.data import DataLoader

from r2serve import Communicator
from r2serve.errors import InvalidArgumentError, R2cclError

ME, RANKS = ARGUMENTS["rank"], ARGUMENTS["ranks"]
FORKED, UNHARMED = 7, 0  # exit statuses
SETTLED_S = 60.0
"""Longest wait for the end of connections and threads after the storm."""


def exact(communicator: Communicator, turns: int) -> None:
    """Runs all-reduces and checks every element; all ranks take part."""
    for turn in range(turns):
        got = communicator.all_reduce(torch.full((1000,), float(turn)))
        assert bool((got == RANKS * turn).all()), (turn, got[:3])


def status_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def sockets() -> list[str]:
    """Returns the targets of descriptors that only the core or r2serve opens."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if target.startswith(("socket:", "anon_inode:[eventfd]", "/memfd:r2ccl")):
            found.append(target)
    return found


def in_child(body: Callable[[], Any]) -> Any:
    """Returns the result of `body`, run in a forked child."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writes, repr(body()).encode())
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        text = pipe.read()
    assert status_of(child) == 0
    return text


def calls(communicator: Communicator) -> None:
    """A child uses all public calls of the parent's objects, then makes its own communicator."""
    data = torch.full((1000,), 5.0)
    part = communicator.twin("part")
    uses: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: communicator.all_reduce(data),
        "all_gather": lambda: communicator.all_gather(data),
        "reduce_scatter": lambda: communicator.reduce_scatter(data),
        "broadcast": lambda: communicator.broadcast(data, 0),
        "gather": lambda: communicator.gather(data, 0),
        "all_to_all": lambda: communicator.all_to_all(data),
        "send": lambda: communicator.send(data, (ME + 1) % RANKS),
        "recv": lambda: communicator.recv(data, (ME + 1) % RANKS),
        "barrier": communicator.barrier,
        "rails": communicator.rails,
        "events": communicator.events,
        "inject": lambda: communicator.inject(0, "carrier_loss"),
        "abort": lambda: communicator.abort("no reason"),
        "part": lambda: communicator.twin("other"),
        "use of a part": part.barrier,
        "register_buffer": lambda: communicator.register_buffer(data),
    }

    def refused() -> dict[str, str]:
        outcomes = {}
        for name, use in uses.items():
            try:
                use()
                outcomes[name] = "no error"
            except InvalidArgumentError as error:
                outcomes[name] = "refused" if "before a fork" in str(error) else str(error)
        communicator.close()
        return outcomes

    def own() -> str:
        with Communicator.standalone("127.0.0.1", ARGUMENTS["own_port"], 0, 1) as alone:
            return "right" if bool((alone.all_reduce(data) == data).all()) else "wrong"

    if ME == 0:
        say({"uses": in_child(refused), "own": in_child(own), "inherited": in_child(sockets)})
    exact(communicator, 300)
    say("exact")


def orphan(communicator: Communicator) -> None:
    """Runs until killed; a child of rank 1 lives on."""
    if ME == 1:
        child = os.fork()
        if child == 0:
            time.sleep(ARGUMENTS["child_s"])
            os._exit(0)
        say({"child": child})
    data = torch.ones(1000)
    try:
        while True:
            communicator.all_reduce(data)
    except R2cclError as error:
        say({"error": type(error).__name__, "at": time.monotonic()})


def settled_growth(before: dict[str, int]) -> dict[str, int]:
    """Returns the growth of the resources, once it is small or SETTLED_S have passed."""
    most = ARGUMENTS["most_grown"]
    deadline = time.monotonic() + SETTLED_S
    while True:
        now = resources()
        grown = {name: now[name] - count for name, count in before.items()}
        if all(grown[name] <= most[name] for name in most) or time.monotonic() > deadline:
            return grown
        time.sleep(0.1)


def storm(communicator: Communicator) -> None:
    """Forks many children during collectives and rail flaps."""
    foreign = os.open("/dev/null", os.O_RDONLY)
    stop = threading.Event()

    def flap() -> None:
        """Breaks one rail at a time; the other rail carries the collectives meanwhile."""
        rail = 0
        while not stop.wait(0.03):
            rail = 1 - rail
            for fault in ("carrier_loss", "heal", "reset"):
                communicator.inject(rail, fault)
                time.sleep(0.003)

    flapping = threading.Thread(target=flap, daemon=True)
    forks, wrong = 0, []
    data = torch.ones(1000)
    if ME == 0:
        before = resources()
        flapping.start()
    for turn in range(ARGUMENTS["forks"]):
        if ME == 0:
            child = os.fork()
            if child == 0:
                harmed = sockets() or os.readlink(f"/proc/self/fd/{foreign}") != "/dev/null"
                os._exit(FORKED if harmed else UNHARMED)
        got = communicator.all_reduce(data * turn)
        assert bool((got == RANKS * turn).all()), turn
        if ME == 0:
            status = status_of(child)
            forks += 1
            if status != UNHARMED:
                wrong.append(status)
    if ME == 0:
        stop.set()
        flapping.join()
        gc.collect()
        grown = settled_growth(before)
        downs = sum("->DOWN" in event.text for event in communicator.events())
        say({"forks": forks, "wrong": wrong[:5], "grown": grown, "downs": downs})
    communicator.barrier()
    say("exact")


def square(number: int) -> int:
    return number * number


def pools(communicator: Communicator) -> None:
    """Workers of a DataLoader and of a fork pool live during collectives."""
    rows: Any = list(range(64))
    with get_context("fork").Pool(2) as pool:
        for _ in range(2):
            loader: DataLoader[int] = DataLoader(
                rows, batch_size=8, num_workers=2, multiprocessing_context="fork"
            )
            seen = [int(value) for batch in loader for value in batch]
            assert seen == rows
            assert pool.map(square, rows) == [square(row) for row in rows]
            exact(communicator, 100)
    say("exact")


def main() -> None:
    communicator = Communicator.standalone(ARGUMENTS["host"], ARGUMENTS["port"], ME, RANKS)
    exact(communicator, 50)
    say("ready")
    hear()
    works = (calls, orphan, storm, pools)
    next(work for work in works if work.__name__ == ARGUMENTS["work"])(communicator)
    communicator.close()
    os._exit(0)


if __name__ == "__main__":
    main()
