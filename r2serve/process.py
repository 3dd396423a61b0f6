"""The engine of this operating-system process, shared by all communicators of the process."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import select
import socket
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from r2serve import _core
from r2serve.config import Config
from r2serve.drills.service import DrillService
from r2serve.errors import ConfigError, InvalidArgumentError
from r2serve.observe import files
from r2serve.ports.choice import Port, select_ports
from r2serve.ports.identity import node_identity
from r2serve.ports.pairing import PortInfo, ProcessInfo, pair_secret, rails_between
from r2serve.ports.rdma import Carrier, carrier_of, list_ports

LINGER_S = 5.0
"""Seconds a close waits for delivery, at most."""
KEPT_JOURNALS = 64
"""Journals of ended workers kept in the folder when a new worker starts."""

_LOG = logging.getLogger("r2serve.r2ccl")
_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)


@dataclass(frozen=True)
class RailInfo:
    """The current state of a rail of this process; counters begin with the process."""

    name: str
    kind: str
    """``tcp``, ``verbs``, ``shm``, or ``control`` (the management NIC)."""
    peer: str
    state: str
    """``CONNECTING``, ``PROBATION``, ``UP``, ``SUSPECT``, ``DOWN`` or ``FENCING``."""
    cause: str
    """First symptom of the last loss; ``none``: no loss."""
    verdict: str
    """Location of the fault behind the rail's last failure: local NIC, remote NIC, path, transient;
    none: not yet known, or no fault of the network."""
    slow: bool
    epoch: int
    device: str
    """Network interface, or RDMA device and port; empty: unknown."""
    local: str
    remote: str
    peer_host: str
    """Name of the peer's host; empty: no connection yet."""
    peer_device: str
    """The peer's interface, or RDMA device and port; empty: unknown."""
    round_trip_ns: int
    """Smoothed round trip."""
    rate: int
    """Bandwidth measured when the rail was last the bottleneck, bytes/s; 0: never measured."""
    tx_bytes: int
    rx_bytes: int
    """Bytes of all frames, headers included; the same holds for ``tx_bytes``."""
    data_tx_bytes: int
    """Sent bytes of data frames, headers included."""
    replayed_chunks: int
    """Chunks of this rail sent again on another rail; includes ``hedged_chunks``."""
    hedged_chunks: int
    """Replayed chunks sent while this rail was only suspected."""
    index: int
    """Position among the rails of the link."""
    peer_engine: int
    """Number of the peer's engine."""


class Origin:
    """The process that made an object; a child forked later cannot use the object."""

    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def foreign(self) -> bool:
        """Whether this process is a child forked after the object was made."""
        return self._process != os.getpid()

    def check(self, what: str) -> None:
        """``what`` names the object.

        Raises:
            InvalidArgumentError: this process is a child forked after the object was made.
        """
        if self.foreign:
            raise InvalidArgumentError(made_before_fork(what))


def made_before_fork(what: str) -> str:
    """Returns the text of the error for a use of the parent's object in a forked child."""
    return (
        f"{what}: made before a fork, and usable only in the parent process; "
        "make a new one in the child"
    )


@dataclass(eq=False)
class Process:
    """This process: engine and listening ports."""

    config: Config
    rank_hint: int
    management_address: str | None
    engine: _core.Engine = field(init=False)
    info: ProcessInfo = field(init=False)
    log: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        config = self.config
        number = secrets.randbelow(2**32 - 1) + 1
        if config.journal_dir:
            files.prune(config.journal_dir, KEPT_JOURNALS)
        self.engine = _core.Engine(config.core_fields(), number)
        self.engine.set_label(f"rank {self.rank_hint}")
        self.drills: DrillService | None = None
        unix_name = f"r2ccl-{number}-{secrets.token_hex(8)}"
        self.engine.listen("shm", "", unix_name)
        self.info = ProcessInfo(
            process=number,
            secret=secrets.token_bytes(32),
            node=node_identity(config.node, self.rank_hint),
            host=socket.gethostname(),
            ports=self._listen_on_ports(),
            control=self._listen_for_control(),
            unix_name=unix_name,
        )
        if config.drills:
            path = Path(self.engine.journal_path).with_suffix(".drills")
            self.drills = DrillService(self.engine, path)

    def _listen_on_ports(self) -> tuple[PortInfo, ...]:
        ports = select_ports(
            self.config.rails, self.config.management, self.management_address, list_ports()
        )
        self._rail_addresses = {port.address for port in ports}
        infos = []
        for port in ports:
            info = PortInfo.of(port, self._carrier_of(port))
            number = self.engine.listen("tcp", info.device, info.address)
            infos.append(replace(info, port=number))
        return tuple(infos)

    def _carrier_of(self, port: Port) -> Carrier:
        """Chooses the transport of this port's rails: verbs or TCP.

        Raises:
            ConfigError: ``rdma`` is ``require`` and the port cannot use verbs.
        """
        carrier = carrier_of(port.rdma, port.address, self.config, self.engine.open_verbs)
        where = f"{port.name} ({port.device or port.address})"
        if carrier.why_tcp and self.config.rdma == "require":
            raise ConfigError(
                f"rdma (R2CCL_RDMA) is 'require', but rails of {where} would use TCP: "
                f"{carrier.why_tcp}"
            )
        if carrier.why_tcp and self.config.rdma == "auto" and port.rdma is not None:
            _LOG.warning("rails of %s use TCP instead of verbs: %s", where, carrier.why_tcp)
        return carrier

    def _listen_for_control(self) -> PortInfo | None:
        """Listens on the management NIC: for control frames, and for data without other rails."""
        address = self.management_address
        if address is None or address in self._rail_addresses or address.startswith("127."):
            return None
        return PortInfo("", address, self.engine.listen("control", "", address))

    def add_peer(self, peer: ProcessInfo, label: str, own_node: int) -> None:
        """Makes the link to a peer unless the link exists.

        Raises:
            ConfigError: no rail is possible, or a rail would use TCP although ``rdma`` is
                ``require``.
        """
        if peer.process == self.info.process:
            raise ConfigError(
                f"{label} is this process itself: each rank needs a separate process, "
                "or a separate engine (share_engine=False)"
            )
        if not self.engine.has_peer(peer.process):
            required = self.config.rdma == "require"
            rails = rails_between(self.info, peer, own_node, require_verbs=required)
            self.engine.add_peer(peer.process, label, pair_secret(self.info, peer), rails)


# Reentrant: garbage collection may release an engine in a thread that holds the lock.
_LOCK = threading.RLock()
_SHARED: dict[Config, Process] = {}
_USERS: Counter[Process] = Counter()
"""Number of communicators of each open engine."""


def has_engines() -> bool:
    """Whether this process has an open engine; a cheap check."""
    return bool(_USERS)


def opened() -> list[Process]:
    """Returns the open engines of this process: a single engine, unless configurations differ."""
    return list(_USERS)


def acquire(config: Config, rank: int, management_address: str | None, share: bool) -> Process:
    """Returns the engine of this configuration, or a private engine without ``share``.

    Pair with :func:`release`.
    """
    with _LOCK:
        process = _SHARED.get(config) if share else None
        if process is None or process not in _USERS:  # released in the meantime
            logging.getLogger("r2serve").setLevel(config.log_level.upper())
            process = Process(config, rank, management_address)
            process.log = threading.Thread(
                target=_forward_log, args=(process.engine,), name="r2ccl-log", daemon=True
            )
            process.log.start()
            if share:
                _SHARED[config] = process
        _USERS[process] += 1
        return process


def retain(process: Process) -> None:
    """Counts another communicator of an engine. Pair with :func:`release`.

    Raises:
        InvalidArgumentError: the engine is closed, or belongs to a parent process.
    """
    with _LOCK:
        if process in _PARENTS:
            raise InvalidArgumentError(made_before_fork("communicator"))
        if process not in _USERS:
            raise InvalidArgumentError("the communicator has been closed")
        _USERS[process] += 1


def release(process: Process) -> None:
    """Drops a communicator of an engine; the last release closes the engine."""
    with _LOCK:
        if process not in _USERS:
            return  # an engine of the parent before a fork
        _USERS[process] -= 1
        if _USERS[process] > 0:
            return
        _forget(process)
    _close(process)


def _forget(process: Process) -> None:
    del _USERS[process]
    for config in [config for config, shared in _SHARED.items() if shared is process]:
        del _SHARED[config]


def _close(process: Process) -> None:
    if process.drills is not None:
        process.drills.close()
    process.engine.close(LINGER_S)
    # A daemon thread returning from the core during interpreter exit would crash the process, so
    # the exit waits for the thread. Garbage collection may run this function in that thread.
    if process.log is not threading.current_thread():
        process.log.join()


_BEFORE_EXIT: list[Callable[[], None]] = []


def before_exit(call: Callable[[], None]) -> Callable[[], None]:
    """Registers a function to run at interpreter exit, while links are still open."""
    _BEFORE_EXIT.append(call)
    return call


@atexit.register
def _close_all() -> None:
    """Closes engines left open at exit, so that their pending data is still delivered."""
    for call in _BEFORE_EXIT:
        call()
    with _LOCK:
        left = list(_USERS)
        for process in left:
            _forget(process)
    for process in left:
        _close(process)


def _after_fork() -> None:
    """Forgets the parent's engines in a forked child, because a fork copies no threads."""
    _LOCK.release()
    _PARENTS.extend(_USERS)  # kept alive: the destructor would wait for threads absent here
    _USERS.clear()
    _SHARED.clear()


_PARENTS: list[Process] = []
os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_after_fork)


def _forward_log(engine: _core.Engine) -> None:
    poller = select.poll()
    poller.register(engine.log_fd, select.POLLIN)
    while (lines := engine.take_log()) is not None:
        for level, text in lines:
            _LOG.log(_LEVELS[level], "%s", text)
        poller.poll()
