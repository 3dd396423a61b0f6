"""Identities of nodes and communicators, equal in all processes, and local addresses."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from collections.abc import Sequence
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


def communicator_id(name: str, members: list[int], start: str) -> int:
    """Returns an id equal on all members, and unique in the job.

    ``start`` is a text equal on all members and different in each start. A count of starts would
    differ between the members after a start that failed on some of them.
    """
    return _digest(f"{name}/{members}/{start}")


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
