"""Identities of nodes and communicators, equal in all processes, and local addresses."""

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
    """Returns a text equal for ranks of the same node and different for all others.

    Args:
        spec: ``R2CCL_NODE``. Empty: ranks with the same boot id and network namespace share a node;
            ``per-rank``: every rank is a node; any other text: ranks with the same text share a
            node.
        rank: this rank.
    """
    if spec == "per-rank":
        return f"rank:{rank}"
    if spec:
        return f"name:{spec}"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"boot:{boot}/net:{os.stat('/proc/self/ns/net').st_ino}"


def local_address_towards(host: str) -> str | None:
    """Returns this machine's address on the route to ``host``; sends nothing."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        _LOG.debug("no route towards %s: %s", host, error)
        return None


def address_towards_master() -> str | None:
    """Returns this machine's address on the route to torch's ``MASTER_ADDR``, if set."""
    master = os.environ.get("MASTER_ADDR")
    return local_address_towards(master) if master else None


_MADE: dict[tuple[int, str, tuple[int, ...]], Iterator[int]] = defaultdict(itertools.count)


def communicator_id(process: int, name: str, members: list[int]) -> int:
    """Returns an id equal on all members, and unique in the job.

    Each call returns a new id, so all members must call the function once per communicator.
    """
    nth = next(_MADE[process, name, tuple(members)])
    return _digest(f"{name}/{members}/{nth}")


def part_id(parent: int, name: str, ranks: Sequence[int]) -> int:
    """Returns the id of a communicator of some ranks of ``parent``; equal on all these ranks.

    The id is unique unless ``parent`` makes two communicators with this name and these ranks.
    """
    return _digest(f"{parent:x}/{name}/{list(ranks)}")


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def number_nodes(identities: Sequence[str]) -> list[int]:
    """Numbers nodes in order of first appearance."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(identity, len(numbers)) for identity in identities]
