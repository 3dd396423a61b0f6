"""A rank with tensors of more than 2^31 and 2^32 bytes; reports the wrong bytes of each call."""

from __future__ import annotations

import torch
from parent import ARGUMENTS, say

from r2serve import Communicator
from r2serve.config import Config

ME, BYTES = ARGUMENTS["rank"], ARGUMENTS["bytes"]
PART = 1 << 26
EDGES = [at for at in (0, 2**31 - 1, 2**31, 2**32 - 1, 2**32) if at < BYTES] + [BYTES - 1]


def marked(value: int) -> torch.Tensor:
    """Returns BYTES bytes of ``value``, and other values beside the ends of 31 and 32 bits."""
    data = torch.full((BYTES,), value, dtype=torch.uint8)
    for number, edge in enumerate(EDGES, start=1):
        data[edge] = 10 * number + value
    return data


def wrong(data: torch.Tensor, value: int, sources: int) -> int:
    """Returns the number of wrong bytes in a sum of ``sources`` marked tensors."""
    marks = {edge: 10 * number * sources + value for number, edge in enumerate(EDGES, start=1)}
    differ = sum(int((part != value).sum()) for part in data.split(PART))
    differ -= sum(int(data[at]) != value for at in marks)
    return differ + sum(int(data[at]) != mark for at, mark in marks.items())


def main() -> None:
    config = Config(rails="127.0.0.1,127.0.0.2", node="per-rank", link_timeout_s=120.0)
    communicator = Communicator.standalone("127.0.0.1", ARGUMENTS["port"], ME, 2, config=config)
    data = marked(ME + 1)
    communicator.all_reduce(data, out=data)
    found = {"all_reduce": wrong(data, 3, 2)}
    del data
    data = marked(4 if ME == 0 else 0)
    communicator.broadcast(data, 0)
    found["broadcast"] = wrong(data, 4, 1)
    data = marked(6 if ME == 1 else 0)
    if ME == 1:
        communicator.send(data, 0)
    else:
        communicator.recv(data, 1)
    found["send"] = wrong(data, 6, 1)
    communicator.barrier()
    say({"wrong": found})
    communicator.close()


if __name__ == "__main__":
    main()
