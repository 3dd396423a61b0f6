"""A rank behind a relay: all-reduces until the other rank is lost; the line `die` ends this one.

Lines of JSON go to standard output. Times are CLOCK_MONOTONIC, in s.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time

import torch

from r2serve import Communicator
from r2serve.errors import R2cclError


def say(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def die_when_told() -> None:
    if sys.stdin.readline().strip() == "die":
        say({"dies_at": time.monotonic()})
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    rank = int(os.environ["RANK"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    communicator = Communicator.standalone(host, port, rank, 2)
    communicator.barrier()
    threading.Thread(target=die_when_told, daemon=True).start()
    say({"ready": rank})
    data = torch.ones(4096)
    try:
        while True:
            communicator.all_reduce(data, "max", out=data)
    except R2cclError as error:
        said = time.monotonic()
        say({"error": type(error).__name__, "text": str(error), "at": said})
    communicator.close()
    os._exit(0)


if __name__ == "__main__":
    main()
