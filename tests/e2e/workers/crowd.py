"""A rank of many on few cores: reports its start, then its calls, suspicions and losses of rails.

Calls alternate between a communicator with resilience and one without, each with its own links.
"""

from __future__ import annotations

import dataclasses
import logging
import time

import torch
from parent import ARGUMENTS, LogLines, hear, say

from r2serve import Communicator
from r2serve.config import Config
from r2serve.observe import journal
from r2serve.observe.journal import Journal

ME, RANKS = ARGUMENTS["rank"], ARGUMENTS["ranks"]
PATIENCE_S = 240.0
TURNS_PER_LOOK = 8


def connect(name: str, port: int, config: Config) -> Communicator:
    return Communicator.standalone(
        ARGUMENTS["host"],
        port,
        ME,
        RANKS,
        name=name,
        config=config,
        timeout_s=PATIENCE_S,
        share_engine=False,
    )


def moves(lines: list[str], arrow: str) -> list[str]:
    return [line for line in lines if arrow in line]


def journal_of(communicator: Communicator) -> Journal:
    return journal.parse(communicator._process.engine.journal_bytes(), events=False)


def counts(communicator: Communicator, lines: list[str]) -> dict[str, float]:
    """Returns suspicions, chunks sent again, and the stalls charged to rails."""
    rails, groups = communicator.rails(), journal_of(communicator).groups
    return {
        "suspicions": len(moves(lines, "UP -> SUSPECT")),
        "hedges": sum(rail.hedged_chunks for rail in rails),
        "withheld": sum(rail.withheld_chunks for rail in rails),
        "replays": sum(rail.replayed_chunks for rail in rails),
        "stalled_ms": sum(group.stalled_ns for group in groups) / 1e6,
    }


def main() -> None:
    logging.getLogger("r2serve").setLevel(logging.DEBUG)
    log = LogLines()
    config = Config.from_env()
    say({"imported": True})
    hear()
    began = time.monotonic()
    communicator = connect("resilient", ARGUMENTS["port"], config)
    communicator.barrier()
    connected_s = time.monotonic() - began
    while any(rail.state != "UP" for rail in communicator.rails()):
        if time.monotonic() - began > PATIENCE_S:
            raise TimeoutError([rail for rail in communicator.rails() if rail.state != "UP"])
        time.sleep(0.05)
    all_up_s = time.monotonic() - began
    say(
        {
            "connected_s": connected_s,
            "all_up_s": all_up_s,
            "failed": len(moves(log.lines, "PROBATION -> DOWN")),
            "dropped": len(moves(log.lines, "too many unauthenticated connections")),
            "located": len(moves(log.lines, "the fault is")),
        }
    )
    if not ARGUMENTS["seconds"]:
        hear()
        return
    plain = None
    if ARGUMENTS["plain_port"]:
        plain = connect(
            "plain", ARGUMENTS["plain_port"], dataclasses.replace(config, resilience=False)
        )
    data = torch.ones(ARGUMENTS["bytes"] // 4)
    times: dict[bool, list[float]] = {True: [], False: []}
    calm: list[float] = []  # calls of the resilient communicator without a stall charged to a rail
    stop = torch.zeros(1)
    warm = 0
    at_start: dict[str, float] = {}
    began = time.monotonic()
    turn = 0
    while not stop[0]:
        elapsed = time.monotonic() - began
        order = (communicator, plain) if plain else (communicator,)
        # The first call of a turn waits for late ranks, so the order changes.
        for one in order[:: 1 if turn % 2 else -1]:
            stalled_ns = communicator._process.engine.stalled_ns
            start = time.monotonic()
            result = one.all_reduce(data)
            times[one is communicator].append(time.monotonic() - start)
            if one is communicator and communicator._process.engine.stalled_ns == stalled_ns:
                calm.append(times[True][-1])
            assert result[0] == RANKS
            assert result[-1] == RANKS
        if not at_start and elapsed > ARGUMENTS["warm_s"]:
            warm = len(times[True])
            at_start = counts(communicator, log.lines)
        turn += 1
        if turn % TURNS_PER_LOOK == 0:
            stop[0] = float(ME == 0 and elapsed > ARGUMENTS["seconds"])
            communicator.broadcast(stop, 0)
    after = sorted(times[True][warm:])
    before = sorted(times[False][warm:])
    at_end = counts(communicator, log.lines)
    say(
        {
            "calls": len(after),
            "p50_ms": after[len(after) // 2] * 1e3,
            "p99_ms": after[len(after) * 99 // 100] * 1e3,
            "plain_p50_ms": before[len(before) // 2] * 1e3 if before else None,
            "longest_calm_ms": max(calm, default=0.0) * 1e3,
            **{name: count - at_start.get(name, 0) for name, count in at_end.items()},
            "short_of_cpu_s": journal_of(communicator).short_of_cpu_ns / 1e9,
            "downs": moves(log.lines, "UP -> DOWN") + moves(log.lines, "SUSPECT -> DOWN"),
        }
    )
    hear()


if __name__ == "__main__":
    main()
