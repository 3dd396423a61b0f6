"""Values of a node with a relay, told to a node 0 without one over vLLM's handshake socket.

A data-parallel engine without ``--nnodes`` has no store of torch before its ranks meet. If node 0
has no relay, a ZMQ socket of vLLM listens at the master address and port, until the engines of all
nodes are up. Equal nodes send nothing of r2serve there. A relay that meets the socket ends its
node. Before, the first process of the node tells its values (:func:`ask`), and r2serve on node 0
answers with the sentence about the difference (:func:`hear`). Each message is a single frame:

| sender | frame |
|---|---|
| node with a relay | JSON: ``node``, ``nodes``, ``host``, ``values`` |
| node 0 | JSON: ``refused``, the sentence |
| node with a relay | ``heard`` |

vLLM ends its start after a message of any other sender. So the messages need no key, and a node 0
without r2serve ends with an error of vLLM. This module imports ZMQ, which vLLM brings along.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from r2serve.engines.node_store import ComparedNode
from r2serve.errors import ConfigError
from r2serve.observe.names import printable
from r2serve.relay.lines import NO_RELAY
from r2serve.relay.meeting import MOST_NODES

_LOG = logging.getLogger(__name__)

MODULE, WAIT = "vllm.v1.engine.utils", "wait_for_engine_startup"
"""Where vLLM waits at node 0 for the engines of all nodes."""
SENDER = b"r2serve:"
"""Begin of the ZMQ identity of a node with a relay; an engine's identity has two bytes."""
HEARD = b"heard"
LONGEST = 1 << 16
"""Bytes of a message, at most."""
ANSWER_S = 15.0
"""Longest wait for node 0, which reads its socket once its processes are started."""
LINGER_S = 15.0
"""Longest wait of node 0 until every other node has heard."""
DELIVERY_S = 1.0


@dataclass(frozen=True)
class Told:
    """The values of a node with a relay."""

    node: int
    nodes: int
    host: str
    values: Mapping[str, str]


def read(message: Sequence[Any]) -> Told | None:
    """Returns the values in a message with its sender; None: of another sender, or malformed."""
    if len(message) != 2 or not message[0].startswith(SENDER) or len(message[1]) > LONGEST:
        return None
    try:
        body = json.loads(message[1])
        values = {str(name): str(value) for name, value in body["values"].items()}
        told = Told(int(body["node"]), int(body["nodes"]), printable(str(body["host"])), values)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError):
        return None
    return told if 0 < told.node < told.nodes <= MOST_NODES else None


# ---- node 0 ----


class HandshakeSocket(zmq.Socket[bytes]):
    """vLLM's socket; a message of a node with a relay is answered, and ends the start."""

    differs: Callable[[Told], str]
    """Returns the sentence about a node."""
    end: Callable[[str], None]
    """Called with the sentence of the first node, once every node has heard."""

    def recv_multipart(self, *args: Any, **options: Any) -> Any:
        """As of ZMQ.

        Raises:
            ConfigError: the sentence about a node with a relay.
        """
        message = super().recv_multipart(*args, **options)
        told = read(message)
        if told is None:
            return message
        text = self._answer(message[0], told)
        self._outlive({message[0]: told.node}, told.nodes)
        self.end(text)
        raise ConfigError(text)

    def _answer(self, sender: bytes, told: Told) -> str:
        text = self.differs(told)
        self.send_multipart((sender, json.dumps({"refused": text}).encode()))
        return text

    def _outlive(self, answered: dict[bytes, int], nodes: int) -> None:
        """Answers until every other node has heard, for LINGER_S."""
        waiting = set(range(1, nodes))
        until_s = time.monotonic() + LINGER_S
        while waiting and (left_s := until_s - time.monotonic()) > 0:
            if not self.poll(int(left_s * 1000)):
                return
            sender, *frames = message = super().recv_multipart()
            if sender in answered and frames == [HEARD]:
                waiting.discard(answered[sender])
            elif told := read(message):
                self._answer(sender, told)
                answered[sender] = told.node


def hear(differs: Callable[[Told], str], end: Callable[[str], None]) -> None:
    """Makes vLLM's start at this node 0 answer nodes with a relay; imports vLLM.

    Another call replaces the functions. See :class:`HandshakeSocket`.
    """
    try:
        utils: Any = importlib.import_module(MODULE)
        found = getattr(utils, WAIT)
    except (ImportError, AttributeError) as error:
        _LOG.warning("a node with a relay does not learn the values of this node: %s", error)
        return
    real = getattr(found, "r2serve_real", found)

    @functools.wraps(real)
    def wait_and_hear(handshake_socket: Any, *args: Any, **options: Any) -> Any:
        own = HandshakeSocket.shadow(handshake_socket)
        own.differs, own.end = differs, end
        return real(own, *args, **options)

    wait_and_hear.r2serve_real = real  # type: ignore[attr-defined]
    setattr(utils, WAIT, wait_and_hear)


# ---- a node with a relay ----


def ask(node: ComparedNode) -> str:
    """Tells the values of this node to a node 0 without a relay; returns the sentence.

    Node 0 does not answer without r2serve. The sentence has no values then.
    """
    try:
        text = _ask(node)
    except (OSError, UnicodeError, zmq.ZMQError) as error:
        _LOG.debug("%s, port %d: %s", node.master, node.port, error)
        text = ""
    return text or (
        f"node 0 (at {node.master}, port {node.port}) has told no values, and {NO_RELAY}"
    )


def _ask(node: ComparedNode) -> str:
    until_s = time.monotonic() + ANSWER_S
    entries = socket.getaddrinfo(node.master, node.port, type=socket.SOCK_STREAM)
    told = {
        "node": node.number,
        "nodes": node.nodes,
        "host": node.host,
        "values": dict(node.values),
    }
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, int(DELIVERY_S * 1000))
        dealer.setsockopt(zmq.MAXMSGSIZE, LONGEST)
        dealer.setsockopt(zmq.IMMEDIATE, 1)  # to an address that has answered
        # A second connection of one identity would be refused.
        dealer.setsockopt(zmq.IDENTITY, SENDER + secrets.token_hex(8).encode())
        for address in {str(entry[4][0]) for entry in entries}:
            if ":" in address:
                dealer.setsockopt(zmq.IPV6, 1)
                address = f"[{address}]"
            dealer.connect(f"tcp://{address}:{node.port}")
        if not dealer.poll(_left_ms(until_s), zmq.POLLOUT):
            return ""
        dealer.send(json.dumps(told).encode(), zmq.NOBLOCK)
        if not dealer.poll(_left_ms(until_s)):
            return ""
        text = _sentence(dealer.recv(zmq.NOBLOCK))
        dealer.send(HEARD, zmq.NOBLOCK)
        return text


def _left_ms(until_s: float) -> int:
    return max(0, int((until_s - time.monotonic()) * 1000))


def _sentence(answer: bytes) -> str:
    try:
        return printable(str(json.loads(answer)["refused"]))
    except (KeyError, TypeError, ValueError, RecursionError):
        return ""
