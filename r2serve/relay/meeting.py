"""The meeting of the relays of a job, before any link exists.

Node 0 listens at the user's own master addresses and port. The relays of the other nodes try every
address until they have the outcome, so that the start needs no particular NIC. Messages are lines
of JSON (:mod:`r2serve.relay.lines`).

Each node also tells the values that all nodes must share. A difference ends the start on every
node with one sentence. Node 0 therefore listens for a while after a failure, until every node has
heard of it. A node without a relay tells its values, too (:mod:`r2serve.relay.teller`), and ends
the start even if they are equal, because it would wait elsewhere.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from r2serve import _core
from r2serve.agreement import difference, node_place, relays_differ
from r2serve.errors import ConfigError, StartupTimeoutError
from r2serve.ports.info import ProcessInfo
from r2serve.relay.lines import Line, NoRelayError, Refused, own_release
from r2serve.relay.strangers import Strangers

MOST_NODES = 252
"""Nodes of a job; node n has the address 127.x.y.(n+1)."""
CANDIDATES = 64
"""Address prefixes proposed by node 0."""
HEARTBEAT_S = 1.0
"""Interval of the signs of life of node 0 to a waiting relay."""
SILENCE_S = 5.0
"""Silence after which a waiting relay tries the next address."""
CONNECT_S = 1.0
"""Wait for a connection to an address of node 0."""
RETRY_S = 0.2
TELL_S = 15.0
"""Interval of the log lines about nodes that are missing."""
GRACE_S = 3.0
"""Wait for the values of a node without a relay, after its engine has connected."""
LINGER_S = 15.0
"""Longest wait until every node has heard of a failure."""
MOST_STRANGERS = 2 * MOST_NODES
"""Connections at the same time that are of no known node; more than the nodes of a job."""

_LOG = logging.getLogger("r2serve.relay")


@dataclass(frozen=True)
class Outcome:
    """What all relays of a job agree on."""

    prefix: str
    """Address prefix of the job: ``127.x.y.0``."""
    infos: dict[int, ProcessInfo]
    """Engine of each node's relay, by node."""


def random_prefixes(count: int) -> list[str]:
    """Returns different prefixes 127.x.y.0 in random order; x is 1 to 254."""
    numbers = secrets.SystemRandom().sample(range(256, 255 * 256), count)
    return [f"127.{number // 256}.{number % 256}.0" for number in numbers]


def free_prefixes(candidates: Sequence[str]) -> list[str]:
    """Returns the candidates not held by a relay of this host, in order."""
    return [prefix for prefix in candidates if _core.is_prefix_free(prefix)]


class Host:
    """The meeting at node 0."""

    def __init__(
        self,
        addresses: Sequence[str],
        port: int,
        nodes: int,
        own: ProcessInfo,
        key: bytes = b"",
        free: Callable[[Sequence[str]], list[str]] = free_prefixes,
        values: Mapping[str, str] | None = None,
        on_late: Callable[[int, ProcessInfo], None] | None = None,
        also: Sequence[str] = (),
    ) -> None:
        """Listens at every address of this node, and at those of ``also`` that this host has.

        ``values``: what every node must share, by name; see :mod:`r2serve.agreement`.
        ``on_late`` is called, in a thread, with each node that joins after the start: its number is
        ``nodes`` or more.

        Raises:
            ConfigError: no address can be listened at.
        """
        self._key = key
        self._nodes = nodes
        self._own = own
        self._candidates = free(random_prefixes(CANDIDATES))
        self._values = values or {}
        self._on_late = on_late
        self._joined: dict[int, tuple[ProcessInfo, list[str]]] = {}
        self._connected: dict[int, Line] = {}
        """The last connection of each node, while it is open."""
        self._outcome: Outcome | None = None
        self._failure = ""
        self._heard: set[int] = set()
        """Nodes that have heard of the failure."""
        self._changed = threading.Condition()
        self._strangers = Strangers(MOST_STRANGERS)
        self._listeners = self._listen(addresses, port, also)
        for listener in self._listeners:
            threading.Thread(
                target=self._accept, args=(listener,), name="relay-meeting", daemon=True
            ).start()

    @staticmethod
    def _listen(addresses: Sequence[str], port: int, also: Sequence[str]) -> list[socket.socket]:
        listeners, failures = [], []
        for address in (*addresses, *also):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((address, port))
                listener.listen(256)
            except OSError as error:
                listener.close()
                if address in addresses:
                    failures.append(f"{address}: {error.strerror}")
                else:  # perhaps of a service in front of this node
                    _LOG.info("the meeting does not listen at %s: %s", address, error.strerror)
                continue
            listeners.append(listener)
        if not listeners:
            raise ConfigError(
                f"control_master (R2CCL_CONTROL_MASTER): no address can be listened at with port "
                f"{port} ({'; '.join(failures)}); must be addresses of node 0"
            )
        for failure in failures:
            _LOG.warning("the meeting of the relays does not listen at %s", failure)
        return listeners

    @property
    def port(self) -> int:
        return int(self._listeners[0].getsockname()[1])

    def gather(self, timeout_s: float) -> Outcome:
        """Waits for the relays of all other nodes.

        Later, relays that lost their connection before the outcome still get it, and further nodes
        may join.

        Raises:
            StartupTimeoutError: relays are missing after ``timeout_s`` seconds.
            ConfigError: a relay does not fit, or no prefix is free on every node.
        """
        with self._changed:
            complete = self._wait_for_all(timeout_s)
            if self._failure:
                self._wait_until_heard()
                raise ConfigError(self._failure)
            if not complete:
                raise StartupTimeoutError(
                    f"the relays of nodes {self._missing()} did not arrive within {timeout_s:g} s"
                )
            free = [
                prefix
                for prefix in self._candidates
                if all(prefix in theirs for _, theirs in self._joined.values())
            ]
            if not free:
                self._failure = "no address prefix 127.x.y.0 is free on every node"
                self._changed.notify_all()
                self._wait_until_heard()
                raise ConfigError(self._failure)
            infos = {node: self._joined[node][0] for node in range(1, self._nodes)}
            self._outcome = Outcome(free[0], {0: self._own, **infos})
            self._changed.notify_all()
            return Outcome(free[0], dict(self._outcome.infos))

    def _missing(self) -> list[int]:
        return [node for node in range(1, self._nodes) if node not in self._joined]

    def _wait_for_all(self, timeout_s: float) -> bool:
        """Waits with the lock held; names the missing nodes in the log."""
        began = time.monotonic()
        while (left_s := began + timeout_s - time.monotonic()) > 0:
            if self._changed.wait_for(
                lambda: not self._missing() or self._failure, min(TELL_S, left_s)
            ):
                return True
            _LOG.warning(
                "the relays of nodes %s are missing for %.0f s",
                self._missing(),
                time.monotonic() - began,
            )
        return not self._missing()

    def _wait_until_heard(self) -> None:
        """Waits with the lock held until every node has heard of the failure, for LINGER_S."""
        others = set(range(1, self._nodes))
        self._changed.wait_for(lambda: others <= self._heard, LINGER_S)

    def close(self) -> None:
        """Ends the meeting; the listeners are closed."""
        for listener in self._listeners:
            # Wakes the accepting thread, too.
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, remote = listener.accept()
            except OSError:
                return  # closed
            self._strangers.admit(connection)
            threading.Thread(
                target=self._serve, args=(connection, remote[0]), name="relay-guest", daemon=True
            ).start()

    def _serve(self, connection: socket.socket, remote: str) -> None:
        with connection:
            connection.settimeout(SILENCE_S)
            line = Line(connection, self._key)
            try:
                # The connection of a dead host ends, so that a relay elsewhere may take its place.
                silence_ms = int(SILENCE_S * 1000)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silence_ms)
                line.exchange_challenges()
                outcome = self._outcome
                candidates = self._candidates if outcome is None else [outcome.prefix]
                line.send({"release": own_release(), "candidates": candidates})
                hello = line.receive()
                refusal = self._differs(hello)
                if refusal:
                    line.send({"refused": refusal, "differs": True})
                    self._has_heard(hello)
                    return
                self._strangers.leave(connection)  # from now on no crowd ends it
                refusal = self._join(hello, line)
                if refusal:
                    _LOG.warning("refused a relay from %s: %s", remote, refusal)
                    line.send({"refused": refusal})
                    return
                while not self._answer(line, int(hello["node"])):
                    line.send({"waits": True})
            except NoRelayError as error:
                with self._changed:  # its first process tells more
                    self._changed.wait_for(lambda: bool(self._failure), GRACE_S)
                self._fail_without_relay(f"the node at {remote}: {error}")
            except Refused as error:
                _LOG.warning("dropped a connection from %s: %s", remote, error)
            except OSError as error:
                _LOG.info("a connection from %s ended: %s", remote, error)
            finally:
                self._strangers.leave(connection)
                self._disconnect(line)

    def _disconnect(self, line: Line) -> None:
        with self._changed:
            for node, last in list(self._connected.items()):
                if last is line:
                    del self._connected[node]
            self._changed.notify_all()

    def _fail_without_relay(self, text: str) -> None:
        """Ends the start, unless a key shows that the network is not trusted."""
        with self._changed:
            if self._key or self._outcome is not None:
                _LOG.warning("dropped a connection: %s", text)
                return
            self._failure = self._failure or text
            self._changed.notify_all()

    def _differs(self, hello: dict[str, Any]) -> str:
        """Compares a node's values and its relay with the own ones; returns a sentence, or nothing.

        A difference ends the start.
        """
        theirs = hello.get("values")
        if hello.get("release") != own_release() or not isinstance(theirs, dict):
            return ""
        try:
            there = node_place(int(hello["node"]), str(hello["host"]))
        except (KeyError, TypeError, ValueError):
            return ""  # refused as malformed
        here = node_place(0, self._own.host)
        text = difference(self._values, here, theirs, there)
        if not text and "info" not in hello:
            text = relays_differ(there, here)
        with self._changed:
            if text and self._outcome is None:
                self._failure = self._failure or text
                self._changed.notify_all()
        return text

    def _has_heard(self, hello: dict[str, Any]) -> None:
        with self._changed:
            self._heard |= {int(hello["node"])} & set(range(self._nodes))
            self._changed.notify_all()

    def _join(self, hello: dict[str, Any], line: Line) -> str:
        """Enters a relay; returns why it does not fit, or an empty text.

        Until the outcome, a relay that has restarted takes the place of the relay before: on the
        same host, or once the connection of the relay before has ended.
        """
        if hello.get("release") != own_release():
            return f"it runs {hello.get('release')}, and node 0 runs {own_release()}"
        try:
            node, info = int(hello["node"]), ProcessInfo.from_wire(hello["info"])
            free = [str(prefix) for prefix in hello["free"]]
        except (KeyError, TypeError, ValueError) as error:
            return f"its message is malformed ({error!r})"
        with self._changed:
            late = self._outcome is not None
            if not (0 < node < self._nodes or (late and self._nodes <= node < MOST_NODES)):
                return f"it is node {node}, and the job starts with nodes 0 to {self._nodes - 1}"
            known = self._joined.get(node)
            if known is not None and known[0].process != info.process:
                gone = node not in self._connected or known[0].node == info.node
                if late or not gone:
                    return f"another relay is node {node} already (host {known[0].host})"
                known = None
            if why := self._shares_host(node, info):
                return why
            if self._outcome is not None and known is None:
                if self._outcome.prefix not in free:
                    return f"address prefix {self._outcome.prefix} of the job is not free there"
                self._outcome.infos[node] = info
            if known is None or not late:
                self._joined[node] = (info, free)
            self._connected[node] = line
            self._changed.notify_all()
        if late and known is None and self._on_late is not None:
            self._on_late(node, info)
        return ""

    def _shares_host(self, node: int, info: ProcessInfo) -> str:
        """Returns why a relay of a host with another relay of the job does not fit."""
        others = {0: self._own} | {number: known for number, (known, _) in self._joined.items()}
        for number, other in others.items():
            if number != node and other.node == info.node:
                return (
                    f"nodes {number} and {node} run on one host ({info.host}), which needs no "
                    "relay: set R2CCL_CONTROL=direct on every node"
                )
        return ""

    def _answer(self, line: Line, node: int) -> bool:
        with self._changed:
            self._changed.wait_for(
                lambda: self._outcome or self._failure or self._connected.get(node) is not line,
                HEARTBEAT_S,
            )
            outcome, failure = self._outcome, self._failure
            if self._connected.get(node) is not line:
                failure = failure or f"a later connection is node {node}"
            infos = dict(outcome.infos) if outcome is not None else {}
        if failure:
            line.send({"refused": failure})
            self._has_heard({"node": node})
            return True
        if outcome is None:
            return False
        wire = {str(node): info.to_wire() for node, info in infos.items()}
        line.send({"prefix": outcome.prefix, "infos": wire})
        return True


def join(
    addresses: Sequence[str],
    port: int,
    node: int,
    own: ProcessInfo,
    timeout_s: float,
    key: bytes = b"",
    free: Callable[[Sequence[str]], list[str]] = free_prefixes,
    values: Mapping[str, str] | None = None,
) -> Outcome:
    """Meets node 0 at any of its addresses; tries them in turn until ``timeout_s`` has passed.

    ``values``: what every node must share, by name; see :mod:`r2serve.agreement`.

    Raises:
        StartupTimeoutError: no address answered in time; the text has the last failure of each.
        Refused: node 0 refuses this relay, or has another key.
    """
    deadline = time.monotonic() + timeout_s
    failures: dict[str, str] = {}
    tell_at = time.monotonic() + TELL_S
    while True:
        for address in addresses:
            if time.monotonic() >= deadline:
                text = "; ".join(f"{at}: {why}" for at, why in failures.items())
                raise StartupTimeoutError(
                    f"no meeting with the relay of node 0 at port {port} within {timeout_s:g} s "
                    f"({text or 'no attempt'})"
                )
            try:
                with socket.create_connection((address, port), CONNECT_S) as connection:
                    return _ask(connection, node, own, key, free, values or {}, deadline)
            except OSError as error:
                failures[address] = error.strerror or str(error)
        if time.monotonic() >= tell_at:
            tell_at = time.monotonic() + TELL_S
            text = "; ".join(f"{at}: {why}" for at, why in failures.items())
            _LOG.warning("no meeting with the relay of node 0 at port %d so far (%s)", port, text)
        time.sleep(RETRY_S)


def _ask(
    connection: socket.socket,
    node: int,
    own: ProcessInfo,
    key: bytes,
    free: Callable[[Sequence[str]], list[str]],
    values: Mapping[str, str],
    deadline: float,
) -> Outcome:
    connection.settimeout(SILENCE_S)
    line = Line(connection, key)
    line.exchange_challenges()
    offer = line.receive()
    if offer.get("release") != own_release():
        raise Refused(f"node 0 runs {offer.get('release')}, and this node runs {own_release()}")
    line.send(
        {
            "release": own_release(),
            "node": node,
            "host": own.host,
            "values": dict(values),
            "info": own.to_wire(),
            "free": free([str(prefix) for prefix in offer.get("candidates", [])]),
        }
    )
    while time.monotonic() < deadline:
        answer = line.receive()
        if answer.get("differs"):
            raise Refused(str(answer["refused"]))
        if "refused" in answer:
            raise Refused(f"node 0 refused the relay of node {node}: {answer['refused']}")
        if "prefix" in answer:
            return _outcome(answer)
    raise TimeoutError("other nodes are missing")


def _outcome(answer: Mapping[str, Any]) -> Outcome:
    try:
        wire = answer["infos"].items()
        infos = {int(number): ProcessInfo.from_wire(info) for number, info in wire}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Refused(f"the outcome of node 0 is malformed ({error!r})") from error
    return Outcome(str(answer["prefix"]), infos)
