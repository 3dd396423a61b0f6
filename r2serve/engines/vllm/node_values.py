"""Comparison of the values that all nodes of an engine must share, before a node waits for another.

A start script of one node may lack the flag, or set another option. vLLM's own start would wait for
a node that never comes. A node 0 with a relay hears the values of all relays
(:mod:`r2serve.relay.meeting`). Everywhere else, with or without the flag, the first process of a
node tells its values in a thread: to the relay of node 0, or over torch's store, which the engine's
rank 0 opens at the same address and port. A difference ends the engine on every node.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from r2serve.agreement import difference, node_place, node_values
from r2serve.config import Config
from r2serve.engines import flag
from r2serve.engines.vllm import control, ending, exit_status
from r2serve.errors import ConfigError
from r2serve.ports.info import read_key
from r2serve.relay import teller
from r2serve.relay.lines import Refused

_LOG = logging.getLogger(__name__)

WAIT_S = 600.0
"""Longest wait for the other nodes; a node without r2serve never tells its values."""
RETRY_S = 0.5
LOOK_S = 0.2
LINGER_S = 15.0
"""Longest wait of node 0, whose process has the store, until every node has heard."""
CONNECT_S = 2.0

_started = False


@dataclass(frozen=True)
class Node:
    """This node, and the values that it tells."""

    number: int
    nodes: int
    master: str
    port: int
    host: str
    values: Mapping[str, str]
    has_relay: bool
    """A relay of this node tells the values, too, if node 0 has a relay."""
    key: bytes = b""

    @property
    def place(self) -> str:
        return node_place(self.number, self.host)


def compare_once(vllm_config: Any) -> None:
    """Starts the comparison in the first process of a command line; elsewhere does nothing.

    Call before a relay starts, because a relay waits for node 0.
    """
    global _started
    if _started or not flag.of_command_line or multiprocessing.parent_process() is not None:
        return
    node = _here(vllm_config)
    if node is None or (node.number == 0 and node.has_relay):
        return
    _started = True
    threading.Thread(target=_run, args=(node, _end), name="r2serve-nodes", daemon=True).start()


def _here(vllm_config: Any) -> Node | None:
    """Returns this node of an engine with ``--nnodes``; None: no other node, or another start."""
    environ = {flag.VARIABLE: "default"} | dict(os.environ)
    config = Config.from_env() if flag.active() else Config()
    site = control.relay_site_of(vllm_config, config)
    place = control.site_of(vllm_config.parallel_config, Config(control="rails"))
    if not isinstance(place, control.Site):
        return None  # on one host, under Ray, or by an external launcher
    return Node(
        place.node,
        place.nodes,
        place.master,
        place.port,
        socket.gethostname(),
        node_values(environ),
        has_relay=flag.active() and isinstance(site, control.Site),
        key=_key(),
    )


def _key() -> bytes:
    """Returns the job's key; a node without the flag may have none."""
    try:
        return read_key(Config.from_env().secret_file)
    except ConfigError as error:
        _LOG.debug("values are told without a key: %s", error)
        return b""


def _run(node: Node, end: Callable[[str], None]) -> None:
    until_s = time.monotonic() + WAIT_S
    while time.monotonic() < until_s:
        try:
            text = compare(node)
        except (OSError, RuntimeError, Refused) as error:  # RuntimeError: of torch's store
            _LOG.debug("node 0 is not there yet: %s", error)
            time.sleep(RETRY_S)
            continue
        if text:
            end(text)
        return


def compare(node: Node) -> str:
    """Compares the values with the other nodes; returns a sentence, or an empty text.

    Raises:
        OSError, RuntimeError, Refused: node 0 does not answer, or not any more.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch names it outside __all__

    # A relay short of CPU may greet late, and takes a client of a store for a node without a relay.
    for _ in range(0 if node.number == 0 else 2 if node.has_relay else 1):
        with socket.create_connection((node.master, node.port), CONNECT_S) as connection:
            if teller.greets(connection):
                if node.has_relay:
                    return ""
                return teller.tell(connection, node.number, node.host, node.values, node.key)
    store = TCPStore(
        node.master,
        node.port,
        is_master=False,
        timeout=timedelta(seconds=CONNECT_S),
        wait_for_workers=False,
    )
    return compare_over(store, node)


def compare_over(store: Any, node: Node) -> str:
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


def _end(text: str) -> None:
    flag.log_with(logging.getLogger("vllm"), "info")
    _LOG.error("the nodes of this engine differ, so the engine exits: %s", text)
    exit_status.listen_once()  # vLLM may end this process first, with status 0
    exit_status.report(text)
    ending.end_engine(text)
