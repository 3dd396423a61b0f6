"""A rank of a job; the last rank makes a wrong call in each case."""

from __future__ import annotations

from typing import Any

import torch
from parent import ARGUMENTS, say

from r2serve import Communicator
from r2serve.errors import R2cclError

ME, RANKS = ARGUMENTS["rank"], ARGUMENTS["ranks"]
MISTAKEN = ME == RANKS - 1


def other_operation(c: Communicator) -> None:
    c.all_reduce(torch.ones(8), "max" if MISTAKEN else "sum")


def other_size(c: Communicator) -> None:
    c.all_reduce(torch.ones(9 if MISTAKEN else 8))


def other_large_size(c: Communicator) -> None:
    c.all_reduce(torch.ones(2_000_000 + MISTAKEN))


def other_dtype(c: Communicator) -> None:
    c.all_reduce(torch.ones(8, dtype=torch.int32 if MISTAKEN else torch.float32))


def other_root(c: Communicator) -> None:
    c.broadcast(torch.ones(8), 1 if MISTAKEN else 0)


def other_collective(c: Communicator) -> None:
    c.all_gather(torch.ones(8)) if MISTAKEN else c.all_reduce(torch.ones(8))


def other_algorithm(c: Communicator) -> None:
    c.all_reduce(torch.ones(8), algorithm="two_shot" if MISTAKEN else "one_shot")


def one_call_more(c: Communicator) -> None:
    if MISTAKEN:
        c.barrier()
    c.all_reduce(torch.ones(8))


def other_parts(c: Communicator) -> None:
    """The sizes differ, but the sum of the sizes and therefore the tag are the same."""
    sizes = [4] * RANKS
    if MISTAKEN:
        sizes[0], sizes[1] = 3, 5
    c.reduce_scatterv(torch.ones(4 * RANKS), sizes)


CASES = {
    case.__name__: case
    for case in (
        other_operation,
        other_size,
        other_large_size,
        other_dtype,
        other_root,
        other_collective,
        other_algorithm,
        one_call_more,
        other_parts,
    )
}


def main() -> None:
    lasting = Communicator.standalone(ARGUMENTS["host"], ARGUMENTS["port"], ME, RANKS)
    for name, port in zip(CASES, ARGUMENTS["ports"], strict=True):
        c = Communicator.standalone(ARGUMENTS["host"], port, ME, RANKS, name=name)
        said: dict[str, Any] = {"case": name, "error": None, "text": ""}
        try:
            # A rank may still be in this call while other ranks already disagree on the next call.
            assert c.all_reduce(torch.ones(1))[0] == RANKS
            CASES[name](c)
            c.barrier()  # a rank with the right call may get the error only here
        except R2cclError as error:
            said |= {"error": type(error).__name__, "text": str(error)}
        c.close()
        # The mistake must not affect the other communicator.
        said["others"] = lasting.all_reduce(torch.ones(1))[0].item()
        say(said)
    lasting.close()


if __name__ == "__main__":
    main()
