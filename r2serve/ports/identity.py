"""Names that several processes work out alike: of nodes and communicators; and own addresses."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import socket
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

_LOG = logging.getLogger(__name__)


def node_identity(spec: str, rank: int) -> str:
    """A text that ranks of one node share and no others.

    Args:
        spec: ``R2CCL_NODE``. Empty: ranks of one boot of one machine in one network namespace share
            a node; ``per-rank``: every rank is a node; any other text: ranks with the same text.
        rank: the rank that asks.
    """
    if spec == "per-rank":
        return f"rank:{rank}"
    if spec:
        return f"name:{spec}"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"boot:{boot}/net:{os.stat('/proc/self/ns/net').st_ino}"


def local_address_towards(host: str) -> str | None:
    """This machine's address on the way to ``host``; nothing is sent."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        _LOG.debug("no route towards %s: %s", host, error)
        return None


def address_towards_master() -> str | None:
    """This machine's address on the way to torch's ``MASTER_ADDR``, if that is known."""
    master = os.environ.get("MASTER_ADDR")
    return local_address_towards(master) if master else None


_MADE: dict[tuple[int, str, tuple[int, ...]], Iterator[int]] = defaultdict(itertools.count)


def communicator_id(process: int, name: str, members: list[int]) -> int:
    """The same on all members, and of no other communicator of the job."""
    nth = next(_MADE[process, name, tuple(members)])
    return _digest(f"{name}/{members}/{nth}")


def part_id(parent: int, name: str, ranks: Sequence[int]) -> int:
    """Of a communicator of some ranks of ``parent``: the same on all of them.

    Of no other, as long as the parent makes no two of that name with those ranks.
    """
    return _digest(f"{parent:x}/{name}/{list(ranks)}")


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def number_nodes(identities: Sequence[str]) -> list[int]:
    """Nodes by first appearance."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(identity, len(numbers)) for identity in identities]
