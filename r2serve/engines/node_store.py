"""Comparison of the nodes of an engine over torch's store, before a node waits for another.

The engine's rank 0 opens a TCPStore at an address and port that every node knows. The first process
of each node tells its values there, with or without the flag. A difference ends the engine on every
node.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from r2serve.agreement import difference, node_place
from r2serve.errors import ConfigError

_LOG = logging.getLogger(__name__)

WAIT_S = 600.0
"""Longest wait for the other nodes; a node without r2serve never tells its values."""
RETRY_S = 0.5
LOOK_S = 0.2
LINGER_S = 15.0
"""Longest wait of node 0, whose process has the store, until every node has heard."""
CONNECT_S = 2.0


@dataclass(frozen=True)
class ComparedNode:
    """This node as a party to the comparison: its values, and where node 0 compares them."""

    number: int
    nodes: int
    master: str
    port: int
    host: str
    values: Mapping[str, str]
    has_relay: bool = False
    """A relay of this node tells the values, too, if node 0 has a relay."""
    key: bytes = b""
    has_store: bool = True
    """The engine's rank 0 opens torch's store at the address; else only a relay hears values."""

    @property
    def place(self) -> str:
        return node_place(self.number, self.host)


def run(
    node: ComparedNode, compare: Callable[[ComparedNode], str], end: Callable[[str], None]
) -> None:
    """Compares until node 0 answers; calls ``end`` with the sentence about a difference.

    Args:
        compare: as :func:`compare`; an error means that node 0 does not answer yet.
    """
    until_s = time.monotonic() + WAIT_S
    while time.monotonic() < until_s:
        try:
            text = compare(node)
        except (OSError, RuntimeError, ConfigError) as error:  # RuntimeError: of torch's store
            _LOG.debug("node 0 is not there yet: %s", error)
            time.sleep(RETRY_S)
            continue
        if text:
            end(text)
        return


def compare(node: ComparedNode) -> str:
    """Compares the values with the other nodes; returns a sentence, or an empty text.

    Raises:
        OSError, RuntimeError: node 0 has no store yet, or not any more.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(
        node.master,
        node.port,
        is_master=False,
        timeout=timedelta(seconds=CONNECT_S),
        wait_for_workers=False,
    )
    return compare_over(store, node)


def compare_over(store: Any, node: ComparedNode) -> str:
    """Compares the values over a ``torch.distributed.Store``; see :func:`compare`."""
    store.set(_told(node.number), json.dumps({"host": node.host, "values": dict(node.values)}))
    others = [other for other in range(node.nodes) if other != node.number]
    missing = list(others)
    until_s = time.monotonic() + WAIT_S
    while missing and time.monotonic() < until_s:
        for other in [one for one in missing if store.check([_told(one)])]:
            missing.remove(other)
            said = json.loads(store.get(_told(other)))
            there = node_place(other, said["host"])
            if text := difference(node.values, node.place, said["values"], there):
                store.set(_heard(node.number), "")
                if node.number == 0:
                    _outlive(store, [_heard(one) for one in others])
                return text
        time.sleep(LOOK_S)
    return ""


def _outlive(store: Any, keys: list[str]) -> None:
    until_s = time.monotonic() + LINGER_S
    while not store.check(keys) and time.monotonic() < until_s:
        time.sleep(LOOK_S)


def _told(node: int) -> str:
    return f"r2serve/node_values/{node}"


def _heard(node: int) -> str:
    return f"r2serve/node_values/heard/{node}"
