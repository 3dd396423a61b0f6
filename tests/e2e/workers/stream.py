"""A rank that runs a stream of all-reduces, checks every bit, and answers requests meanwhile.

Rank 0 sets the first element to stop the stream, so that all ranks stop after the same step.
"""

from __future__ import annotations

import os
import threading
import time

import torch
from parent import ARGUMENTS, LogLines, hear, resources, say

from r2serve import Communicator
from r2serve.errors import R2cclError
from r2serve.observe import journal

ME, RANKS = ARGUMENTS["rank"], ARGUMENTS["ranks"]
COUNT = ARGUMENTS.get("bytes", 16 * 1024) // 4
PAUSE_S = ARGUMENTS.get("pause_s", 0.0)


class Stream:
    def __init__(self, communicator: Communicator, log: LogLines) -> None:
        self.communicator = communicator
        self.log = log
        self.steps = 0
        self.stop = False
        self.own_clock = time.pthread_getcpuclockid(threading.get_ident())
        pattern = torch.arange(COUNT, dtype=torch.float32) % 251
        self.inputs = [pattern + rank for rank in range(RANKS)]
        self.inputs[ME][0] = 0.0
        self.sum = torch.stack([pattern + rank for rank in range(RANKS)]).sum(0)
        self.sum[0] = 0.0

    def run(self) -> None:
        """Runs steps until a stop request at rank 0, or until a typed error."""
        source = self.inputs[ME]
        out = torch.empty_like(source)
        while True:
            source[0] = 1.0 if self.stop and ME == 0 else 0.0
            # The bits differ from step to step, so that a late message is detected.
            source[1] = float(self.steps % 65536 + ME)
            self.communicator.all_reduce(source, out=out)
            last = bool(out[0])
            self.sum[0] = out[0]
            self.sum[1] = float(RANKS * (self.steps % 65536) + RANKS * (RANKS - 1) // 2)
            if not torch.equal(out, self.sum):
                at = (out != self.sum).nonzero().flatten()[:5].tolist()
                raise AssertionError(f"step {self.steps} is wrong at {at}")
            self.steps += 1
            if last:
                return
            if PAUSE_S:
                time.sleep(PAUSE_S)

    def answer(self, request: dict) -> object:
        what = request["do"]
        communicator = self.communicator
        if what == "inject":
            communicator.inject(request["rail"], request["fault"], request.get("peer"))
        elif what == "rails":
            return [vars(rail) for rail in communicator.rails()]
        elif what == "events":
            return [vars(event) for event in communicator.events()]
        elif what == "short_of_cpu":
            read = journal.parse(communicator._process.engine.journal_bytes(), events=False)
            return read.short_of_cpu_ns
        elif what == "log":
            return self.log.lines
        elif what == "warnings":
            return self.log.warnings
        elif what == "steps":
            return self.steps
        elif what == "pid":
            return os.getpid()
        elif what == "resources":
            return resources()
        elif what == "threads_s":
            # CPU time of all threads but the one with the calls
            return time.process_time() - time.clock_gettime(self.own_clock)
        elif what != "stop":
            raise ValueError(what)
        return None

    def serve(self) -> None:
        while True:
            request = hear()
            say(self.answer(request))
            # The main thread reports the end of the stream after this answer.
            self.stop = self.stop or request["do"] == "stop"


def main() -> None:
    log = LogLines()
    communicator = Communicator.standalone(ARGUMENTS["host"], ARGUMENTS["port"], ME, RANKS)
    stream = Stream(communicator, log)
    communicator.barrier()
    say({"ready": [rail.remote for rail in communicator.rails()]})
    threading.Thread(target=stream.serve, daemon=True).start()
    try:
        stream.run()
    except R2cclError as error:
        say({"error": type(error).__name__, "text": str(error), "at": time.monotonic()})
        os._exit(0)
    except AssertionError as error:
        say({"wrong": str(error)})
        os._exit(1)
    say({"steps": stream.steps, "events": [vars(event) for event in communicator.events()]})
    communicator.close()


if __name__ == "__main__":
    main()
