"""This operating-system process's engine, which all its communicators share."""

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
"""How long a close may wait for delivery."""
KEPT_JOURNALS = 64
"""Of workers that have ended, in the folder of a new one."""

_LOG = logging.getLogger("r2serve.r2ccl")
_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)


@dataclass(frozen=True)
class RailInfo:
    """A rail of this process, as it is now."""

    name: str
    kind: str
    peer: str
    state: str
    cause: str
    verdict: str
    """Where the fault is that the rail went down by: local NIC, remote NIC, path, transient; none:
    not known yet, or nothing of the network."""
    slow: bool
    epoch: int
    device: str
    """The interface, or the RDMA device and port; empty: none was named."""
    local: str
    remote: str
    round_trip_ns: int
    rate: int
    """Bytes per second when the rail was last what traffic waited for; 0: it never was."""
    tx_bytes: int
    rx_bytes: int
    data_tx_bytes: int
    replayed_chunks: int
    hedged_chunks: int
    index: int
    """Its place among the rails of its link."""
    peer_engine: int
    """Number of the peer's engine."""


@dataclass(eq=False)
class Process:
    """This process: its engine, and the ports that peers may connect to."""

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
        """What carries this port's rails.

        Raises:
            ConfigError: it has to be verbs and cannot.
        """
        carrier = carrier_of(port.rdma, port.address, self.config, self.engine.open_verbs)
        where = f"{port.name} ({port.device or port.address})"
        if carrier.why_tcp and self.config.rdma == "require":
            raise ConfigError(f"rdma (R2CCL_RDMA) is 'require', but of {where} {carrier.why_tcp}")
        if carrier.why_tcp and self.config.rdma == "auto" and port.rdma is not None:
            _LOG.warning("%s: its rails go over TCP: %s", where, carrier.why_tcp)
        return carrier

    def _listen_for_control(self) -> PortInfo | None:
        """Control frames also go over the management NIC, and data while nothing else is left."""
        address = self.management_address
        if address is None or address in self._rail_addresses or address.startswith("127."):
            return None
        return PortInfo("", address, self.engine.listen("control", "", address))

    def add_peer(self, peer: ProcessInfo, label: str, own_node: int) -> None:
        """Make the link to a peer, if there is none yet.

        Raises:
            ConfigError: the two have no pair of ports, or one that is not verbs as it has to be.
        """
        if peer.process == self.info.process:
            raise ConfigError(
                f"{label} is this process itself: each rank needs a process of its own, "
                "or an engine of its own (share_engine=False)"
            )
        if not self.engine.has_peer(peer.process):
            required = self.config.rdma == "require"
            rails = rails_between(self.info, peer, own_node, require_verbs=required)
            self.engine.add_peer(peer.process, label, pair_secret(self.info, peer), rails)


# Garbage collection may release an engine while its own thread is in here.
_LOCK = threading.RLock()
_SHARED: dict[Config, Process] = {}
_USERS: Counter[Process] = Counter()
"""Communicators of each open engine."""


def has_engines() -> bool:
    """Whether this process has an open engine; costs next to nothing."""
    return bool(_USERS)


def opened() -> list[Process]:
    """The open engines of this process: one, unless configurations differ."""
    return list(_USERS)


def acquire(config: Config, rank: int, management_address: str | None, share: bool) -> Process:
    """The engine for this configuration; without ``share`` one of its own.  Pair with release."""
    with _LOCK:
        process = _SHARED.get(config) if share else None
        if process is None or process not in _USERS:  # released since
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
    """One more communicator of an engine.  Pair with release.

    Raises:
        InvalidArgumentError: the engine has been closed, or is that of a parent process.
    """
    with _LOCK:
        if process not in _USERS:
            raise InvalidArgumentError("the communicator has been closed")
        _USERS[process] += 1


def release(process: Process) -> None:
    """The last communicator closes the engine."""
    with _LOCK:
        if process not in _USERS:
            return  # of the parent that forked us
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
    # A thread that comes back from the core while the interpreter ends takes the process with it.
    # Garbage collection may have brought us here in that very thread.
    if process.log is not threading.current_thread():
        process.log.join()


_BEFORE_EXIT: list[Callable[[], None]] = []


def before_exit(call: Callable[[], None]) -> Callable[[], None]:
    """Have something done when the interpreter ends, while links are still there."""
    _BEFORE_EXIT.append(call)
    return call


@atexit.register
def _close_all() -> None:
    """What nobody closed still delivers what it owes."""
    for call in _BEFORE_EXIT:
        call()
    with _LOCK:
        left = list(_USERS)
        for process in left:
            _forget(process)
    for process in left:
        _close(process)


def _after_fork() -> None:
    """A child has none of its parent's threads, so none of its engines."""
    _LOCK.release()
    _PARENTS.extend(_USERS)  # kept: to destroy an engine is to wait for its threads
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
