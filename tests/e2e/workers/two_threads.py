"""A rank that uses three communicators from three threads, in a different order on each rank."""

from __future__ import annotations

import threading

import torch
from parent import ARGUMENTS, say

from r2serve import Communicator

ME, RANKS, STEPS = ARGUMENTS["rank"], ARGUMENTS["ranks"], ARGUMENTS["steps"]


def work(communicator: Communicator, which: int, wrong: list[str]) -> None:
    try:
        for step in range(STEPS):
            count = 400_000 if step % 50 == which else 17 * (which + 1)
            data = torch.full((count,), float(1000 * which + step + ME))
            out = communicator.all_reduce(data)
            expected = RANKS * (1000 * which + step) + RANKS * (RANKS - 1) // 2
            if not bool((out == expected).all()):
                wrong.append(f"thread {which}, step {step}: {out[:4]} is not {expected}")
                return
            gathered = communicator.all_gather(data[:5])
            if gathered[:, 4].tolist() != [1000.0 * which + step + r for r in range(RANKS)]:
                wrong.append(f"thread {which}, step {step}: gathered {gathered[:, 4]}")
                return
    except Exception as error:  # noqa: BLE001 - reported by the main thread
        wrong.append(repr(error))


def main() -> None:
    communicators = [
        Communicator.standalone(ARGUMENTS["host"], port, ME, RANKS, name=f"of thread {which}")
        for which, port in enumerate(ARGUMENTS["ports"])
    ]
    wrong: list[str] = []
    threads = [
        threading.Thread(target=work, args=(communicator, which, wrong))
        for which, communicator in enumerate(communicators)
    ]
    # Each rank starts the threads in a different order.
    for thread in threads[ME % 3 :] + threads[: ME % 3]:
        thread.start()
    for thread in threads:
        thread.join()
    rails = sorted((rail.peer, rail.name) for rail in communicators[0].rails())
    say(
        {
            "wrong": wrong,
            "rails": rails,
            "same": all(
                sorted((rail.peer, rail.name) for rail in other.rails()) == rails
                for other in communicators
            ),
        }
    )
    for communicator in communicators:
        communicator.close()


if __name__ == "__main__":
    main()
