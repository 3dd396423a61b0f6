"""A rank of a job with a dying rank: runs collectives, and reports the final error."""

from __future__ import annotations

import os
import time

import torch
from parent import ARGUMENTS, hear, say

from r2serve import Communicator
from r2serve.errors import R2cclError

ME, RANKS, VICTIM = ARGUMENTS["rank"], ARGUMENTS["ranks"], ARGUMENTS["victim"]


def all_reduces(communicator: Communicator) -> None:
    data = torch.ones(ARGUMENTS["elements"])
    while True:
        communicator.all_reduce(data, "max", out=data)


def broadcasts(communicator: Communicator) -> None:
    """Broadcasts from each rank in turn, so that the dead rank is sender and receiver."""
    data = torch.ones(ARGUMENTS["elements"])
    while True:
        for root in range(RANKS):
            communicator.broadcast(data, root)


def a_chain(communicator: Communicator) -> None:
    """Passes data from rank to rank: only the victim's successor waits for the victim."""
    data = torch.ones(ARGUMENTS["elements"])
    while True:
        if ME != VICTIM:
            communicator.recv(data, (ME - 1) % RANKS)
        communicator.send(data, (ME + 1) % RANKS)
        if ME == VICTIM:
            communicator.recv(data, (ME - 1) % RANKS)


def rest() -> None:
    """Makes no call until the death of this process, however late the death is."""
    say("at rest")
    time.sleep(3600)


def waiting_for_an_idle_rank(communicator: Communicator) -> None:
    """Waits for an idle rank outside of any call; no rank communicates with the victim."""
    communicator.barrier()
    if ME == VICTIM:
        rest()
    elif ARGUMENTS["idle"] == ME:
        time.sleep(ARGUMENTS["idle_s"])
        communicator.barrier()
    else:
        communicator.recv(torch.ones(10), ARGUMENTS["idle"])


def idle(communicator: Communicator) -> None:
    """Is in no call during the victim's death; the next call reports the error."""
    communicator.barrier()
    if ME == VICTIM:
        rest()
    time.sleep(ARGUMENTS["idle_s"])
    communicator.barrier()


WORK = {
    "all_reduce": all_reduces,
    "broadcast": broadcasts,
    "chain": a_chain,
    "waiting": waiting_for_an_idle_rank,
    "idle": idle,
}


def main() -> None:
    communicator = Communicator.standalone(ARGUMENTS["host"], ARGUMENTS["port"], ME, RANKS)
    communicator.barrier()
    say("ready")
    hear()
    try:
        WORK[ARGUMENTS["work"]](communicator)
    except R2cclError as error:
        said = time.monotonic()
        try:
            communicator.barrier()
        except R2cclError as again:
            sticky = type(again) is type(error)
        else:
            sticky = False
        say({"error": type(error).__name__, "text": str(error), "at": said, "sticky": sticky})
    began = time.monotonic()
    communicator.close()
    say({"closed_s": time.monotonic() - began})
    os._exit(0)


if __name__ == "__main__":
    main()
