"""Comparison of flag and options between the nodes of an SGLang engine, before a node waits.

A start script of one node may lack the flag, or set another option. The schedulers would then wait
for each other in different groups. The first process of each node tells its values over the store
of the engine's rank 0, at ``--dist-init-addr``.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
import threading
from typing import Any

from r2serve.agreement import node_values
from r2serve.engines import children, flag, node_store
from r2serve.engines.node_store import ComparedNode

_LOG = logging.getLogger(__name__)

_started = False


def compare_once(options: Any) -> None:
    """Starts the comparison in the first process of a command line; elsewhere does nothing.

    Args:
        options: SGLang's ServerArgs.
    """
    global _started
    if _started or not flag.of_command_line or multiprocessing.parent_process() is not None:
        return
    node = _here(options)
    if node is None:
        return
    _started = True
    threading.Thread(target=_run, args=(node,), name="r2serve-nodes", daemon=True).start()


def _here(options: Any) -> ComparedNode | None:
    """Returns this node; None: no other node, or SGLang refuses the address."""
    if options.nnodes < 2:
        return None
    master, _, port = (options.dist_init_addr or "").rpartition(":")
    if not master or not port.isdecimal():
        return None
    return ComparedNode(
        options.node_rank,
        options.nnodes,
        master.strip("[]"),
        int(port),
        socket.gethostname(),
        node_values({flag.VARIABLE: "default"} | dict(os.environ)),
    )


def _run(node: ComparedNode) -> None:
    node_store.run(node, node_store.compare, _end)


def _end(text: str) -> None:
    _LOG.critical(
        "the nodes of this engine differ, so the engine exits with status %d: %s",
        children.EXIT_STATUS,
        text,
    )
    children.leave()
