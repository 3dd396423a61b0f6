"""The word of relays about the end of processes on other nodes.

Where a node has a relay, each process of a job listens at the node's virtual address, and holds an
idle connection to each process of another node. Relays carry these connections, so no lost NIC ends
any. The kernel of a dead process closes its end, which relays pass on as the orderly end of the
connection. The engine then knows of the death without asking the other host.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from collections.abc import Callable, Iterable

from r2serve import _core
from r2serve.errors import R2cclError
from r2serve.forks import close_in_children
from r2serve.process import opened
from r2serve.relay.client import Carried, PortTakenError

ATTEMPTS = 16
"""Listeners made one after another, while a port is taken on another node."""
BACKLOG = 1024
CONNECT_S = 10.0
RELAY_S = 0.1
"""Wait for an answer of the own relay; a living relay may be slower."""

_LOG = logging.getLogger("r2serve.relay")

Gone = Callable[[int], None]


class Words:
    """Connections to processes of other nodes, and a listener for theirs.

    gone: called in a thread with the number of each engine whose process has ended. relay_lives:
    whether the relay of this node lives, whose end would end all connections at once.
    """

    def __init__(self, carried: Carried, gone: Gone, relay_lives: Callable[[], bool]) -> None:
        """Raises OSError or R2cclError without a listener that has mirrors."""
        self._carried = carried
        self._gone = gone
        self._relay_lives = relay_lives
        self._lock = threading.Lock()
        self._listener = _listen(carried)
        self._accepted: dict[int, socket.socket] = {}
        self._held: dict[int, tuple[socket.socket, str]] = {}
        self._engines: dict[str, set[int]] = {}
        self._poll = select.epoll()
        self._poll.register(self._listener, select.EPOLLIN)
        close_in_children(self)
        threading.Thread(target=self._watch, name="r2serve-word", daemon=True).start()

    @property
    def endpoint(self) -> str:
        """Place where other nodes reach the listener, as ``127.x.y.z:port``."""
        address, port = self._listener.getsockname()
        return f"{address}:{port}"

    def hold(self, endpoint: str, engine: int) -> None:
        """Connects to the process with an engine, once a process.

        Raises:
            OSError: no relay carries the connection.
            ValueError: the endpoint is malformed, or no virtual address of another node.
        """
        address, _, port = endpoint.rpartition(":")
        if not self._carried.has(address) or address == self._carried.address:
            raise ValueError(f"{endpoint!r} is no virtual address of another node")
        with self._lock:
            known = endpoint in self._engines
            self._engines.setdefault(endpoint, set()).add(engine)
        if known:
            return
        try:
            connection = socket.create_connection((address, int(port)), CONNECT_S)
        except BaseException:
            with self._lock:
                self._engines.pop(endpoint)
            raise
        connection.setblocking(False)
        with self._lock:
            self._held[connection.fileno()] = connection, endpoint
        self._poll.register(connection, select.EPOLLIN)

    def left_behind(self) -> None:
        """Closes all descriptors in a forked child."""
        self._poll.close()
        self._listener.close()
        for accepted in self._accepted.values():
            accepted.close()
        for held, _ in self._held.values():
            held.close()

    def _watch(self) -> None:
        while True:
            for number, _ in self._poll.poll():
                if number == self._listener.fileno():
                    self._accept()
                elif number in self._accepted:
                    self._drop(self._accepted.pop(number))
                else:
                    with self._lock:
                        connection, endpoint = self._held.pop(number)
                    self._end(connection, endpoint)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # the other process has given up, or descriptors are short
            _LOG.debug("a connection of another node is not accepted: %s", error)
            return
        self._accepted[connection.fileno()] = connection
        self._poll.register(connection, select.EPOLLIN)

    def _drop(self, connection: socket.socket) -> None:
        """Closes a connection of a process that has ended; nothing was ever sent."""
        self._poll.unregister(connection)
        connection.close()

    def _end(self, connection: socket.socket, endpoint: str) -> None:
        """Tells of the end of a process after an orderly end; resets tell of lost relays."""
        try:
            in_order = connection.recv(1) == b""
        except OSError:
            in_order = False
        self._drop(connection)
        with self._lock:
            engines = self._engines.pop(endpoint, set())
        if in_order and self._relay_lives():
            for engine in engines:
                self._gone(engine)


def _listen(carried: Carried) -> socket.socket:
    for attempt in range(ATTEMPTS):
        listener = socket.create_server((carried.address, 0), backlog=BACKLOG)
        try:
            carried.sync()
        except PortTakenError:
            listener.close()
            if attempt + 1 == ATTEMPTS:
                raise
        except BaseException:
            listener.close()
            raise
        else:
            listener.setblocking(False)
            return listener
    raise AssertionError("unreachable")


def relay_lives(carried: Carried) -> bool:
    """Whether the relay of this node answers, or at least keeps a connection open."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(RELAY_S)
            connection.connect("\0" + _core.sync_socket_name(carried.prefix, carried.node))
            return connection.recv(1) != b""
    except TimeoutError:
        return True
    except OSError:
        return False


_LOCK = threading.Lock()
_words: tuple[int, Carried, Words | None] | None = None
"""Process and relay of the words; None in place of the words: they cannot be had."""


def _here() -> Words | None:
    """Returns the words of this process; None: no relay, or no listener."""
    global _words
    carried = Carried.here()
    if carried is None:
        return None
    with _LOCK:
        if _words is None or _words[:2] != (os.getpid(), carried):
            made: Words | None = None
            try:
                made = Words(carried, _tell, lambda: relay_lives(carried))
            except (OSError, R2cclError, RuntimeError) as error:  # RuntimeError: no thread
                _LOG.info("the end of this process is told without the relay: %s", error)
            _words = os.getpid(), carried, made
        return _words[2]


def _tell(engine: int) -> None:
    for process in opened():
        process.engine.on_word_of_end(engine)


def endpoint() -> str:
    """Returns the place for processes of other nodes; empty: no relay, or no listener."""
    words = _here()
    return "" if words is None else words.endpoint


def hold(places: Iterable[tuple[str, int]]) -> None:
    """Holds connections to processes of other nodes, given as pairs of endpoint and engine.

    A connection that cannot be had costs no start: a death is then proved by refusals.
    """
    words = _here()
    if words is None:
        return
    for place, engine in places:
        try:
            words.hold(place, engine)
        except (OSError, ValueError) as error:
            _LOG.info("the end of the process at %s is told without a relay: %s", place, error)
