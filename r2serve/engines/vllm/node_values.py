"""Comparison of the values that all nodes of an engine must share, before a node waits for another.

A start script of one node may lack the flag, or set another option. vLLM's own start would wait for
a node that never comes. A node 0 with a relay hears the values of all relays
(:mod:`r2serve.relay.meeting`). Everywhere else, with or without the flag, the first process of a
node tells its values in a thread: to the relay of node 0, or over torch's store, which the engine's
rank 0 opens at the same address and port. A difference ends the engine on every node.

Nodes of a data-parallel engine without ``--nnodes`` have no such store before their ranks meet. A
node without a relay tells its values to the relay of node 0. A node with a relay tells them to a
node 0 without one over vLLM's handshake socket (:mod:`r2serve.engines.vllm.handshake`). If no node
has a relay, the ranks compare later (:mod:`r2serve.engines.vllm.same_flag`).
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from r2serve.agreement import difference, node_place, node_values, relays_differ
from r2serve.config import Config
from r2serve.engines import flag, node_store
from r2serve.engines.node_store import ComparedNode
from r2serve.engines.vllm import control, ending, exit_status
from r2serve.errors import ConfigError
from r2serve.ports.info import read_key
from r2serve.relay import teller
from r2serve.relay.lines import NoRelayError

_LOG = logging.getLogger(__name__)

_started = False


def compare_once(vllm_config: Any) -> None:
    """Starts the comparison in the first process of a command line; elsewhere does nothing.

    Call before a relay starts, because a relay waits for node 0.
    """
    global _started
    if multiprocessing.parent_process() is not None:
        return
    _answer_relays(vllm_config)
    if _started or not flag.of_command_line:
        return
    node = _here(vllm_config)
    if node is None or (node.number == 0 and (node.has_relay or not node.has_store)):
        return
    if node.has_relay and not node.has_store and not Config.from_env().control_master:
        return  # the relay itself looks at the master address
    _started = True
    threading.Thread(target=_run, args=(node, _end), name="r2serve-nodes", daemon=True).start()


def _answer_relays(vllm_config: Any) -> None:
    """Answers nodes with a relay at node 0 of a data-parallel engine, if node 0 has none."""
    parallel = vllm_config.parallel_config
    if parallel.nnodes > 1 or parallel.data_parallel_rank != 0 or _has_relay(vllm_config):
        return
    from r2serve.engines.vllm import handshake  # imports ZMQ

    values, host = _values(), socket.gethostname()
    here = node_place(0, host)

    def differs(told: handshake.Told) -> str:
        there = node_place(told.node, told.host)
        return difference(values, here, told.values, there) or relays_differ(here, there)

    def end(text: str) -> None:
        if flag.of_command_line:  # a program around vLLM gets the exception alone
            _end(text)

    handshake.hear(differs, end)


def _values() -> dict[str, str]:
    return node_values({flag.VARIABLE: "default"} | dict(os.environ))


def _has_relay(vllm_config: Any) -> bool:
    if not flag.active():
        return False
    return isinstance(control.relay_site_of(vllm_config, Config.from_env()), control.Site)


def _here(vllm_config: Any) -> ComparedNode | None:
    """Returns this node of an engine on several nodes; None: no other node, or another start."""
    place = control.site_of(vllm_config.parallel_config, Config(control="rails"))
    if not isinstance(place, control.Site):
        return None  # on one host, under Ray, or by an external launcher
    return ComparedNode(
        place.node,
        place.nodes,
        place.master,
        place.port,
        socket.gethostname(),
        _values(),
        has_relay=_has_relay(vllm_config),
        key=_key(),
        has_store=vllm_config.parallel_config.nnodes > 1,
    )


def _key() -> bytes:
    """Returns the job's key; a node without the flag may have none."""
    try:
        return read_key(Config.from_env().secret_file)
    except ConfigError as error:
        _LOG.debug("values are told without a key: %s", error)
        return b""


def _run(node: ComparedNode, end: Callable[[str], None]) -> None:
    node_store.run(node, compare, end)


def compare(node: ComparedNode) -> str:
    """Compares the values with the other nodes; returns a sentence, or an empty text.

    Raises:
        OSError, RuntimeError, Refused: node 0 does not answer, or not any more.
    """
    # A relay short of CPU may greet late, and takes a client of a store for a node without a relay.
    for _ in range(0 if node.number == 0 else 2 if node.has_relay else 1):
        with socket.create_connection((node.master, node.port), node_store.CONNECT_S) as connection:
            try:
                greets = teller.greets(connection)
            except NoRelayError:
                if node.has_store or not node.has_relay:
                    break
                from r2serve.engines.vllm import handshake  # imports ZMQ

                return handshake.ask(node)
            if greets and node.has_relay:
                return ""
            if greets:
                return teller.tell(connection, node.number, node.host, node.values, node.key)
    else:
        if not node.has_store:
            raise TimeoutError("no relay has greeted so far")
    return node_store.compare(node) if node.has_store else ""


def _end(text: str) -> None:
    flag.log_with(logging.getLogger("vllm"), "info")
    _LOG.error("the nodes of this engine differ, so the engine exits: %s", text)
    exit_status.listen_once()  # vLLM may end this process first, with status 0
    exit_status.report(text)
    ending.end_engine(text)
