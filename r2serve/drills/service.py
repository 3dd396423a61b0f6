"""The drill service of a worker: injects faults on request and undoes each fault after its time.

The service runs only with the option ``drills``. A worker listens on a unix socket beside its
journal, open to its own user and to root. A request and an answer are one line of JSON each. Each
client has a thread, since a drill waits for the peers before its fault. The worker undoes its
faults by itself, even if the client is gone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from r2serve.drills.order import ENGINE, SYSTEM, DrillError, Order
from r2serve.errors import R2cclError
from r2serve.faults import DATA_RAILS
from r2serve.forks import close_in_children

_LOG = logging.getLogger("r2serve.drills")

PATTERN = "*.drills"
MAX_LINE = 64 * 1024
_ENDED_KEPT = 64
KNOWN_S = 4.0
"""Time for the peers to confirm a drill before its fault, s."""
_KNOWN_EVERY_S = 0.002
_IN_USE = ("UP", "SUSPECT")
SYSTEM_MARGIN_S = 5.0
"""A drill by the system begins later and ends later than in the worker, by up to this time, s."""
_TALK_S = 2.0
PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Injectable(Protocol):
    """Methods of an engine (``_core.Engine``) used here."""

    def inject(self, rail: int, fault: str, process: int = 0, bytes_per_s: float = 0.0) -> None: ...
    def check_fault(self, fault: str, bytes_per_s: float = 0.0) -> None: ...
    def note_injected(self, rail: int, fault: str, process: int = 0) -> None: ...
    def announce_drill(self, rail: int, fault: str, seconds: float, process: int = 0) -> None: ...
    def end_drill(self, rail: int, process: int = 0) -> None: ...
    def drill_is_known(self, rail: int, process: int = 0) -> bool: ...
    def rails(self) -> list[dict[str, Any]]: ...


@dataclass
class Drill:
    """A drill, running or ended."""

    order: Order
    rails: list[tuple[int, int]]
    """Position of each rail in its link, and the number of the peer's engine."""
    began_clock_ns: int
    ended_clock_ns: int = 0
    """End of the drill, as Unix time in ns; 0: the drill is running."""
    over: threading.Event = field(default_factory=threading.Event)

    def view(self) -> dict[str, Any]:
        """Returns the drill as sent to clients."""
        return asdict(self.order) | {
            "began_clock_ns": self.began_clock_ns,
            "ended_clock_ns": self.ended_clock_ns,
        }


class DrillService:
    """Serves drills of an engine until :meth:`close`."""

    def __init__(self, engine: Injectable, path: Path) -> None:
        """Raises OSError if the socket cannot be created."""
        self._engine = engine
        self._path = path
        self._drills: dict[str, Drill] = {}
        self._ended: deque[Drill] = deque(maxlen=_ENDED_KEPT)
        # Reentrant: garbage collection may close the service in any thread, even in its own.
        self._lock = threading.RLock()
        self._closing = False
        self._clients: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        """Threads of clients and of drills."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        os.fchmod(self._socket.fileno(), 0o600)  # bind() creates the file with this mode
        self._socket.bind(str(path))
        self._socket.listen(8)
        close_in_children(self)
        self._thread = threading.Thread(target=self._serve, name="r2serve-drills", daemon=True)
        self._thread.start()
        _LOG.warning("drills are enabled: this user and root can fault rails through %s", path)

    def close(self) -> None:
        """Ends all drills and stops the service."""
        with self._lock:
            self._closing = True
            for drill in self._drills.values():
                drill.over.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the serving thread
        while running := self._running():
            for thread in running:
                thread.join()
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def left_behind(self) -> None:
        """Closes the sockets in a forked child; the parent's service goes on."""
        self._closing = True
        self._socket.close()
        for client in list(self._clients):
            client.close()

    def _running(self) -> list[threading.Thread]:
        """Returns the other threads of the service. A client may start a drill while it closes."""
        current = threading.current_thread()
        threads = (self._thread, *list(self._threads))
        return [each for each in threads if each.is_alive() and each is not current]

    def _serve(self) -> None:
        while not self._closing:
            try:
                client, _ = self._socket.accept()
            except OSError as error:
                if not self._closing:
                    _LOG.warning("drill socket failed: %s; no drills until the retry in 2 s", error)
                    time.sleep(_TALK_S)
                continue
            self._clients.add(client)
            talk = threading.Thread(
                target=self._talk, args=(client,), name="r2serve-drills", daemon=True
            )
            self._threads.add(talk)
            try:
                talk.start()
            except RuntimeError as error:  # no further thread is possible
                _LOG.warning("drill request failed, without an answer: %s", error)
                self._threads.discard(talk)
                self._clients.discard(client)
                client.close()

    def _talk(self, client: socket.socket) -> None:
        with client:
            client.settimeout(_TALK_S)
            try:
                self._answer(client)
            except Exception:  # noqa: BLE001  the worker must survive any request
                _LOG.warning("drill request failed, without an answer", exc_info=True)
        self._clients.discard(client)
        self._threads.discard(threading.current_thread())

    def _answer(self, client: socket.socket) -> None:
        _, user, _ = PEER_CREDENTIALS.unpack(
            client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS.size)
        )
        if user not in (0, os.getuid()):
            return
        try:
            said = self._do(json.loads(_line(client)))
        except (R2cclError, ValueError, TypeError, KeyError, RecursionError) as error:
            said = {"error": f"{error}"}
        client.sendall(json.dumps(said).encode() + b"\n")

    def _do(self, request: object) -> dict[str, Any]:
        if not isinstance(request, dict):
            raise DrillError("request: must be a JSON object")
        what = request.pop("do", None)
        if what == "rails":
            return {"rails": self._engine.rails()}
        if what == "list":
            with self._lock:
                kept = chain(self._drills.values(), self._ended)
                return {"drills": [drill.view() for drill in kept]}
        if what == "start":
            return {"drill": self._start(Order(**request)).view()}
        if what == "end":
            with self._lock:
                drill = self._drills.get(str(request["id"]))
            if drill is None:
                raise DrillError(f"id: no drill {request['id']!r} is running")
            drill.over.set()
            return {"drill": drill.view()}
        raise DrillError(f"do: {what!r} must be rails, list, start or end")

    def _start(self, order: Order) -> Drill:
        found = [
            (int(rail["index"]), int(rail["peer_engine"]))
            for rail in self._engine.rails()
            if rail["name"] == order.rail
            and rail["kind"] in DATA_RAILS
            and order.peer in ("", rail["peer"])
        ]
        if not found:
            names = sorted(
                {rail["name"] for rail in self._engine.rails() if rail["kind"] in DATA_RAILS}
            )
            if not names:
                raise DrillError("rail: this worker has no rail for drills")
            to = f" to {order.peer}" if order.peer else ""
            raise DrillError(
                f"rail: {order.rail!r}{to} is not a rail of this worker; must be one of "
                f"{', '.join(names)}"
            )
        if order.by == ENGINE:  # a refused drill is told to no peer
            self._engine.check_fault(_first_fault(order), _bytes_per_s(order))
        drill = Drill(order, found, time.time_ns())
        with self._lock:
            if self._closing:
                raise DrillError("do: start is refused, because the worker is closing its links")
            for other in self._drills.values():
                if set(other.rails) & set(found):
                    raise DrillError(
                        f"rail: {order.rail!r} is already in drill {other.order.id}; must be a "
                        "rail without a running drill"
                    )
            self._drills[order.id] = drill
        try:
            self._announce(drill)
            self._fault(drill, _first_fault(order))
        except BaseException:
            self._forget(drill)
            raise
        _LOG.warning(
            "drill %s started: %s of %s for %g s", order.id, order.kind, order.rail, order.seconds
        )
        self._keep_time(drill)
        return drill

    def _keep_time(self, drill: Drill) -> None:
        """Starts the thread that ends the drill; without a thread, undoes the fault at once.

        Raises:
            DrillError: no further thread is possible.
        """
        run = threading.Thread(target=self._run, args=(drill,), name="r2serve-drill", daemon=True)
        self._threads.add(run)
        try:
            run.start()
        except RuntimeError as error:
            self._threads.discard(run)
            self._fault(drill, "heal")
            self._forget(drill)
            raise DrillError(
                f"do: start is refused, because nothing would end the drill: {error}"
            ) from error

    def _forget(self, drill: Drill) -> None:
        """Drops a drill without a fault, and tells its end to the peers."""
        with self._lock:
            del self._drills[drill.order.id]
        self._tell_end(drill)

    def _run(self, drill: Drill) -> None:
        """Waits for the end of the drill, then restores the rails."""
        order = drill.order
        ends = time.monotonic() + _seconds(order)
        faulted = True
        while (left_s := ends - time.monotonic()) > 0:
            flaps = order.kind == "flap" and order.by == ENGINE
            if drill.over.wait(min(left_s, order.period_s / 2) if flaps else left_s):
                break
            if flaps and ends - time.monotonic() > 0:
                faulted = not faulted
                self._fault(drill, "carrier_loss" if faulted else "heal")
        if faulted:
            self._fault(drill, "heal")
        self._tell_end(drill)
        with self._lock:
            drill.ended_clock_ns = time.time_ns()
            self._ended.append(self._drills.pop(order.id))
            self._threads.discard(threading.current_thread())
        _LOG.warning("drill %s ended: %s of %s is undone", order.id, order.kind, order.rail)

    def _announce(self, drill: Drill) -> None:
        """Tells the peers of the drill; returns once all peers with a rail have confirmed.

        A lost peer cannot confirm. The engine tells the peer once a rail is back.

        Raises:
            DrillError: a peer does not confirm in time.
        """
        fault = _first_fault(drill.order)
        for rail, peer in drill.rails:
            self._engine.announce_drill(rail, fault, _seconds(drill.order), peer)
        until_s = time.monotonic() + KNOWN_S
        asked = self._reachable(drill.rails)
        while not all(self._engine.drill_is_known(rail, peer) for rail, peer in asked):
            if time.monotonic() > until_s:
                raise DrillError(
                    f"rail: a peer of {drill.order.rail} did not confirm the drill within "
                    f"{KNOWN_S:g} s, so no fault was made; must be a rail to peers that answer"
                )
            if drill.over.wait(_KNOWN_EVERY_S):
                raise DrillError("do: start is refused, because the drill was ended")

    def _reachable(self, rails: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        """Returns the rails to peers with a rail in use; all rails if no peer has one."""
        peers = {rail["peer_engine"] for rail in self._engine.rails() if rail["state"] in _IN_USE}
        return [each for each in rails if each[1] in peers] or rails

    def _tell_end(self, drill: Drill) -> None:
        for rail, peer in drill.rails:
            self._engine.end_drill(rail, peer)

    def _fault(self, drill: Drill, fault: str) -> None:
        for rail, peer in drill.rails:
            if drill.order.by == SYSTEM:
                self._engine.note_injected(rail, fault, peer)
            else:
                self._engine.inject(rail, fault, peer, _bytes_per_s(drill.order))


def _first_fault(order: Order) -> str:
    return "carrier_loss" if order.kind == "flap" else order.kind


def _bytes_per_s(order: Order) -> float:
    return order.mbit * 125_000


def _seconds(order: Order) -> float:
    """Returns the longest time of the drill: the client ends a drill by the system."""
    return order.seconds + (SYSTEM_MARGIN_S if order.by == SYSTEM else 0.0)


def _line(client: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        more = client.recv(MAX_LINE)
        if not more or len(data) + len(more) > MAX_LINE:
            raise DrillError("request: must be one line of JSON of at most 64 KiB")
        data += more
    return data
