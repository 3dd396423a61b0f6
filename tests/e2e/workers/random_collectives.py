"""A process of the random collectives: makes calls, checks every bit, and injects rail faults."""

from __future__ import annotations

import os
import random as stdlib_random
import threading
import time
import traceback

import numpy as np
import torch
from canonical import SIZE, random_bytes, reduce
from parent import ARGUMENTS, say
from random_plan import Step, make_groups, make_step

from r2serve import Communicator

SEED, ME = ARGUMENTS["seed"], ARGUMENTS["rank"]


class Faults(threading.Thread):
    """Cuts, drops and heals this process's rails at random, until `over` is set."""

    def __init__(self, world: Communicator) -> None:
        super().__init__(name="faults")
        self.world = world
        self.random = stdlib_random.Random(f"{SEED}/{ME}/faults")
        self.injected = {"carrier_loss": 0, "black_hole": 0, "heal": 0}
        self.over = threading.Event()
        self.rails: dict[int, int] = {}
        for rail in world.rails():
            peer = int(rail.peer.removeprefix("rank "))
            self.rails[peer] = self.rails.get(peer, 0) + 1

    def inject(self, rail: int, fault: str, peer: int) -> None:
        self.world.inject(rail, fault, peer)
        self.injected[fault] += 1

    def run(self) -> None:
        pause_s = ARGUMENTS["fault_every_s"]
        while not self.over.wait(self.random.uniform(0.5, 1.5) * pause_s):
            peer = self.random.choice(list(self.rails))
            rail = self.random.randrange(self.rails[peer])
            self.inject(rail, self.random.choice(["carrier_loss", "black_hole"]), peer)
            self.over.wait(self.random.uniform(0, 0.3))
            self.inject(rail, "heal", peer)


class Call:
    """A step from the view of a rank: inputs of all ranks, arguments and expected output."""

    def __init__(self, step: Step, ranks: int, rank: int) -> None:
        self.step, self.ranks, self.rank = step, ranks, rank
        self.row = step.width * SIZE[step.dtype]
        self.inputs = [
            random_bytes(
                np.random.default_rng([SEED, 3, step.number, other]),
                step.dtype,
                step.width * self.rows_of(other),
            )
            for other in range(ranks)
        ]

    def rows_of(self, rank: int) -> int:
        step = self.step
        if step.kind == "all_gatherv":
            return step.rows[0][rank]
        if step.kind in ("reduce_scatterv", "reduce_scatter"):
            return sum(step.rows[0])
        if step.kind in ("all_to_all", "all_to_allv"):
            return sum(step.rows[rank])
        return 0 if step.kind == "barrier" else step.rows[0][0]

    def array(self, raw: np.ndarray) -> torch.Tensor | np.ndarray:
        """Returns the bytes as a tensor or array for the API, in the same memory."""
        dtype = getattr(torch, self.step.dtype)
        # torch cannot change the dtype of an empty view.
        flat = torch.from_numpy(raw).view(dtype) if raw.size else torch.empty(0, dtype=dtype)
        tensor = flat.view(-1, self.step.width)
        return tensor.numpy() if self.step.as_numpy else tensor

    def part(self, sizes: list[int], rank: int) -> slice:
        begin = sum(sizes[:rank]) * self.row
        return slice(begin, begin + sizes[rank] * self.row)

    def run(self, communicator: Communicator) -> None:
        getattr(self, self.step.kind)(communicator)

    def check(self, got: object, wanted: np.ndarray, source: np.ndarray | None = None) -> None:
        if not isinstance(got, torch.Tensor | np.ndarray):
            raise AssertionError(f"{self}: returned {type(got)}")
        tensor = got if isinstance(got, torch.Tensor) else torch.from_numpy(got)
        raw = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0)
        if not np.array_equal(raw, wanted.ravel()):
            at = "another size" if raw.size != wanted.size else np.flatnonzero(raw != wanted)[:8]
            raise AssertionError(f"{self}: wrong at byte {at}")
        if source is not None and not np.array_equal(source, self.inputs[self.rank]):
            raise AssertionError(f"{self}: the input was changed")

    def __str__(self) -> str:
        return f"seed {SEED}, rank {self.rank} of {self.ranks}, {self.step}"

    def own(self) -> np.ndarray:
        return self.inputs[self.rank].copy()

    def folded(self) -> np.ndarray:
        nodes = [NODE_OF[process] for process in GROUPS[self.step.group]]
        return reduce(self.step.dtype, self.step.op, self.inputs, nodes)

    # ---- a method for each collective ----

    def all_reduce(self, communicator: Communicator) -> None:
        step, source = self.step, self.own()
        given = self.array(source)
        out = given if step.in_place else None
        got = communicator.all_reduce(given, step.op, out=out, algorithm=step.algorithm)
        self.check(got, self.folded(), None if step.in_place else source)

    def all_gather(self, communicator: Communicator) -> None:
        self._gather_all(communicator, [self.step.rows[0][0]] * self.ranks)

    def all_gatherv(self, communicator: Communicator) -> None:
        self._gather_all(communicator, self.step.rows[0])

    def _gather_all(self, communicator: Communicator, sizes: list[int]) -> None:
        whole = np.zeros(sum(sizes) * self.row, np.uint8)
        source = whole[self.part(sizes, self.rank)] if self.step.in_place else self.own()
        source[:] = self.inputs[self.rank]
        given, out = self.array(source), self.array(whole) if self.step.in_place else None
        if self.step.kind == "all_gather":
            got = communicator.all_gather(given, out=out)
        else:
            got = communicator.all_gatherv(given, sizes, out=out)
        self.check(got, np.concatenate(self.inputs), source)

    def reduce_scatter(self, communicator: Communicator) -> None:
        self._scatter(communicator)

    def reduce_scatterv(self, communicator: Communicator) -> None:
        self._scatter(communicator)

    def _scatter(self, communicator: Communicator) -> None:
        step, sizes, source = self.step, self.step.rows[0], self.own()
        mine = self.part(sizes, self.rank)
        given, out = self.array(source), self.array(source[mine]) if step.in_place else None
        if step.kind == "reduce_scatter":
            got = communicator.reduce_scatter(given, step.op, out=out)
        else:
            got = communicator.reduce_scatterv(given, sizes, step.op, out=out)
        self.check(got, self.folded()[mine], None if step.in_place else source)

    def broadcast(self, communicator: Communicator) -> None:
        data = self.own()
        got = communicator.broadcast(self.array(data), self.step.root)
        self.check(got, self.inputs[self.step.root])

    def gather(self, communicator: Communicator) -> None:
        root = self.step.root
        if self.rank != root:
            source = self.own()
            if communicator.gather(self.array(source), root) is not None:
                raise AssertionError(f"{self}: an output away from the root")
            return
        sizes = [self.step.rows[0][0]] * self.ranks
        whole = np.zeros(sum(sizes) * self.row, np.uint8)
        source = whole[self.part(sizes, root)] if self.step.in_place else self.own()
        source[:] = self.inputs[root]
        out = self.array(whole) if self.step.in_place else None
        got = communicator.gather(self.array(source), root, out=out)
        self.check(got, np.concatenate(self.inputs), source)

    def all_to_all(self, communicator: Communicator) -> None:
        self._exchange(communicator)

    def all_to_allv(self, communicator: Communicator) -> None:
        self._exchange(communicator)

    def _exchange(self, communicator: Communicator) -> None:
        step, source = self.step, self.own()
        wanted = [self.inputs[r][self.part(step.rows[r], self.rank)] for r in range(self.ranks)]
        arriving = [step.rows[r][self.rank] for r in range(self.ranks)]
        in_place = step.in_place and sum(arriving) == sum(step.rows[self.rank])
        given = self.array(source)
        out = given if in_place else None
        if step.kind == "all_to_all":
            got = communicator.all_to_all(given, out=out)
        else:
            got = communicator.all_to_allv(given, step.rows[self.rank], arriving, out=out)
        self.check(got, np.concatenate(wanted), None if in_place else source)

    def send_recv(self, communicator: Communicator) -> None:
        sender, receiver = self.step.root, self.step.other
        if self.rank == sender:
            source = self.own()
            communicator.send(self.array(source), receiver)
            source[:] = 0  # allowed after the return of send()
        elif self.rank == receiver:
            got = communicator.recv(self.array(self.own()), sender)
            self.check(got, self.inputs[sender])

    def barrier(self, communicator: Communicator) -> None:
        communicator.barrier()


GROUPS = make_groups(SEED, ARGUMENTS["ranks"], len(ARGUMENTS["ports"]))
NODE_OF: list[int] = []


def main() -> None:
    communicators: dict[int, Communicator] = {}
    for index, (members, port) in enumerate(zip(GROUPS, ARGUMENTS["ports"], strict=True)):
        if ME in members:
            communicators[index] = Communicator.standalone(
                ARGUMENTS["host"], port, members.index(ME), len(members), name=f"group{index}"
            )
    world = communicators[0]
    NODE_OF.extend(world.nodes)
    faults = Faults(world)
    began, calls = time.monotonic(), 0
    faults.start()
    try:
        for number in range(ARGUMENTS["steps"]):
            step = make_step(SEED, number, GROUPS)
            if step.group in communicators:
                members = GROUPS[step.group]
                Call(step, len(members), members.index(ME)).run(communicators[step.group])
                calls += 1
    finally:
        faults.over.set()
        faults.join()
    seconds = time.monotonic() - began
    world.barrier()
    rails = world.rails()
    say(
        {
            "calls": calls,
            "seconds": seconds,
            "faults": faults.injected,
            "replays": sum(rail.replayed_chunks for rail in rails),
            "hedges": sum(rail.hedged_chunks for rail in rails),
            "rejoins": sum(rail.epoch - 1 for rail in rails),
            "kinds": sorted({rail.kind for rail in rails}),
        }
    )
    for communicator in communicators.values():
        communicator.close()


if __name__ == "__main__":
    try:
        main()
    except Exception:  # noqa: BLE001 - the test reports it
        say({"failed": traceback.format_exc()})
        os._exit(1)  # other ranks get the same error as after a death
