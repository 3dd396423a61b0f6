"""A rank whose collective is ended by a signal or by a time limit."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

import torch
from parent import ARGUMENTS, hear, say

from r2serve import Communicator
from r2serve.errors import R2cclError
from r2serve.observe import journal

ME, RANKS = ARGUMENTS["rank"], ARGUMENTS["ranks"]


class Stopped(Exception):
    """Raised by a handler."""


def raises(_: int, __: FrameType | None) -> None:
    raise Stopped


def tell_of_a_call(communicator: Communicator) -> None:
    """Says "calls" as soon as a collective is in progress."""
    while True:
        read = journal.parse(communicator._process.engine.journal_bytes(), events=False)
        if any(group.call for group in read.groups):
            say("calls")
            return
        time.sleep(0.01)


def main() -> None:
    communicator = Communicator.standalone(ARGUMENTS["host"], ARGUMENTS["port"], ME, RANKS)
    elements = ARGUMENTS["elements"]
    communicator.all_reduce(torch.ones(elements))
    handled = 0

    def counts(_: int, __: FrameType | None) -> None:
        nonlocal handled
        handled += 1

    # A shell ignores SIGINT in background jobs, and so would this process.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    match ARGUMENTS["handler"]:
        case "raises":
            signal.signal(signal.SIGTERM, raises)
            signal.signal(signal.SIGALRM, raises)
        case "counts":
            signal.signal(signal.SIGTERM, counts)
            signal.signal(signal.SIGALRM, counts)
    say("ready")
    hear()
    if ARGUMENTS["late"] == ME:
        if ARGUMENTS["late_s"]:
            time.sleep(ARGUMENTS["late_s"])
        else:
            hear()
    else:
        threading.Thread(target=tell_of_a_call, args=(communicator,), daemon=True).start()
    error = text = ""
    try:
        if ARGUMENTS["late"] != ME and ARGUMENTS["alarm_s"]:
            again_s = ARGUMENTS["alarm_s"] if ARGUMENTS["handler"] == "counts" else 0
            signal.setitimer(signal.ITIMER_REAL, ARGUMENTS["alarm_s"], again_s)
        for turn in range(ARGUMENTS["turns"]):
            got = communicator.all_reduce(torch.full((elements,), float(turn)))
            assert bool((got == RANKS * turn).all())
    except (R2cclError, KeyboardInterrupt, Stopped) as ended:
        error, text = type(ended).__name__, str(ended)
    signal.setitimer(signal.ITIMER_REAL, 0)
    at = time.monotonic()
    again = ""
    try:
        communicator.barrier()
    except R2cclError as failure:
        again = type(failure).__name__
    say({"error": error, "text": text, "at": at, "again": again, "handled": handled})
    communicator.close()
    os._exit(0)


if __name__ == "__main__":
    main()
