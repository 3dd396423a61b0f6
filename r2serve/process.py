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
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from r2serve import _core, cpus
from r2serve.config import Config
from r2serve.drills.service import DrillService
from r2serve.errors import ConfigError, InternalError, InvalidArgumentError, R2cclError
from r2serve.observe import files
from r2serve.observe.unobserved import Note, Unobserved
from r2serve.ports import nearness, same_network
from r2serve.ports.choice import Port, select_ports
from r2serve.ports.identity import node_identity
from r2serve.ports.info import PortInfo, ProcessInfo, read_key
from r2serve.ports.keys import KeyPair, check_confirmation, confirmation
from r2serve.ports.listening import PortListeners
from r2serve.ports.pairing import lonely_ports, no_data_rail, rails_between
from r2serve.ports.rdma import Transport, list_ports, transport_of
from r2serve.ports.telling import not_used, tell
from r2serve.ports.wires import Question, Wire, ask

LINGER_S = 5.0
"""Seconds a close waits for delivery, at most."""
KEPT_JOURNALS = files.KEPT
"""Journals of ended workers kept in the folder when a new worker starts."""
JOURNAL_BYTES = 1 << 20
"""Room for a journal; the file is slightly smaller."""

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
    """Location of the fault behind the rail's last failure: local NIC, remote NIC, path, transient,
    or peer (its process has ended); none: not told yet, or no fault of the network."""
    slow: bool
    been_up: bool
    """False and not UP: the rail has never been up. True and not UP: the rail is lost."""
    never_up: str
    """Reason why the rail has never been up: ``refused``, ``no_route``, ``own_address``,
    ``no_answer``, ``rejected``, ``probe_unanswered`` or ``no_connection``; empty: none is known."""
    reserve: bool
    """The rail carries data only while no other rail is up."""
    unit: str
    """Name of the port or cable that the rail shares with other rails; empty: independent."""
    drill: str
    """Fault kind of a drill by either end that explains the rail's state; ``unknown``: the peer
    named none; empty: no drill."""
    epoch: int
    device: str
    """Network interface, for verbs with RDMA device, as ``eth0/mlx5_0:1``; empty: unknown."""
    local: str
    remote: str
    peer_host: str
    """Name of the peer's host; empty: no connection yet."""
    peer_device: str
    """The peer's interface, and RDMA device, in the same form; empty: unknown."""
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
    withheld_chunks: int
    """Chunks queued as hedges because a hop acknowledged bytes that the peer did not get."""
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


def _room_for_journal(config: Config) -> str:
    """Deletes old files of the journal's folder; returns why a journal has no room, or empty."""
    folder = config.journal_dir
    if not folder:
        return ""
    try:
        files.prune(folder, KEPT_JOURNALS)
        return files.room_for(folder, JOURNAL_BYTES, config.journal_limit_bytes)
    except OSError:
        return ""  # the engine names the reason when it opens the journal


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
    key: bytes = field(init=False, repr=False)
    """Pre-shared key of the job; empty: none."""
    key_pair: KeyPair = field(init=False, repr=False)

    def __post_init__(self) -> None:
        config = self.config
        self.key = read_key(config.secret_file)
        self.key_pair = KeyPair()
        number = secrets.randbelow(2**32 - 1) + 1
        fields = config.core_fields()
        if no_room := _room_for_journal(config):
            fields["journal_dir"] = ""
        if not config.background_cpus:
            fields["background_cpus"] = cpus.shown(cpus.at_start())
        self.engine = _core.Engine(fields, number)
        label = f"rank {self.rank_hint}"
        self.engine.set_serving_engine(config.serving_engine)  # readers expect it with the label
        self.engine.set_label(label)
        unix_name = f"r2ccl-{number}-{secrets.token_hex(8)}"
        self.engine.listen("shm", "", unix_name)
        self._gpu = nearness.gpu_of_thread(config.cuda_library)
        ports = self._listen_on_ports()
        self.info = ProcessInfo(
            process=number,
            public_key=self.key_pair.public,
            node=node_identity(config.node, self.rank_hint),
            host=socket.gethostname(),
            ports=ports,
            control=self._listen_for_control(ports),
            unix_name=unix_name,
            gpu=nearness.index_of(self._gpu),
            unused=self._unused,
            confirmation=confirmation(self.key, number, self.key_pair.public),
        )
        # From here on nothing raises, so that threads and sockets have an owner.
        self.unobserved: Unobserved | None = None
        if why := no_room or self.engine.no_journal:
            self.unobserved = self._without_journal(label, why)
        self.drills: DrillService | None = None
        if config.drills and not self.engine.journal_path:
            _LOG.info("drills are disabled without a journal")
        elif config.drills:
            path = Path(self.engine.journal_path).with_suffix(".drills")
            try:
                self.drills = DrillService(self.engine, path)
            except (OSError, RuntimeError) as error:  # RuntimeError: no thread
                _LOG.warning("drills are disabled: %s: %s", path, error)

    def _without_journal(self, label: str, why: str) -> Unobserved | None:
        """Tells sidecars of this folder that this process has no journal."""
        if not self.engine.no_journal:  # else the engine has logged the reason
            _LOG.warning(
                "no journal: %s: this process serves without a journal, and r2serve's commands and "
                "sidecar do not see its rails",
                why,
            )
        note = Note(os.getpid(), label, self.config.serving_engine, why)
        try:
            return Unobserved(self.config.journal_dir, note)
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread
            _LOG.debug("sidecars are not told of the missing journal: %s", error)
            return None

    def _listen_on_ports(self) -> tuple[PortInfo, ...]:
        choice = select_ports(
            self.config.rails,
            self.config.management,
            self.management_address,
            list_ports(),
            self.config.fallback and self._has_management_address(),
        )
        tell(choice)
        networks = [(port.device, each.network) for port in choice.ports for each in port.addresses]
        for text in same_network.problems(networks):
            _LOG.warning("%s", text)
        self._rail_addresses = {each.address for port in choice.ports for each in port.addresses}
        self._wires: set[Wire] = set()
        self._asked: set[Wire] = set()
        may_wait = self.config.rdma != "require"
        listening = PortListeners(self.engine.listen, self._transports_of, may_wait, self._gpu)
        infos = (*listening.open(choice.ports), *listening.open_later(choice.later))
        self._unused = tuple(not_used(choice, {info.device for info in infos}))
        return infos

    def _transports_of(self, port: Port) -> list[Transport]:
        """Chooses the transport of this port's rails for each address: verbs or TCP.

        Raises:
            ConfigError: ``rdma`` is ``require`` and the port cannot use verbs.
        """
        transports = [
            transport_of(port.rdma, each.address, self.config, self.engine.open_verbs)
            for each in port.addresses
        ]
        where = f"{port.name} ({port.device or port.address})"
        if not all(transport.why_tcp for transport in transports):
            return transports
        why = transports[0].why_tcp
        if self.config.rdma == "require":
            raise ConfigError(
                f"rdma (R2CCL_RDMA) is 'require', but rails of {where} would use TCP: {why}"
            )
        if self.config.rdma == "auto" and port.rdma is not None:
            _LOG.warning("rails of %s use TCP instead of verbs: %s", where, why)
        return transports

    def _listen_for_control(self, ports: Sequence[PortInfo]) -> PortInfo | None:
        """Listens on the management NIC: for control frames, and for data without other rails."""
        address = self.management_address
        if address is None or address in self._rail_addresses or not self._has_management_address():
            return None
        try:
            number = self.engine.listen("control", "", address)
        except R2cclError as error:
            if not any(not port.waits for port in ports):
                raise
            _LOG.warning("no control rail over %s: %s", address, error)
            return None
        return PortInfo("", address, number)

    def _has_management_address(self) -> bool:
        address = self.management_address
        return address is not None and not address.startswith("127.")

    def find_wires(self, questions: Sequence[Question]) -> list[Wire]:
        """Probes the wires between ports that addresses do not tell apart, each wire once."""
        new = [each for each in questions if each.wire not in self._asked]
        self._wires.update(ask(new))
        self._asked.update(each.wire for each in new)
        return sorted(self._wires)

    def tell_unpaired(self, peers: Sequence[ProcessInfo], wires: Collection[Wire]) -> None:
        """Logs each port of this node without a rail to a peer.

        A port without any rail is a warning of the node's first rank.

        Args:
            peers: all ranks, in rank order.
        """
        first = next(peer for peer in peers if peer.node == self.info.node)
        warns = first.process == self.info.process
        for useless, why in lonely_ports(self.info, peers, wires):
            _LOG.log(logging.WARNING if useless and warns else logging.INFO, "%s", why)

    def add_peer(
        self, peer: ProcessInfo, label: str, own_node: int, wires: Collection[Wire] = ()
    ) -> None:
        """Makes the link to a peer unless the link exists.

        Args:
            wires: see :func:`r2serve.ports.pairing.rails_between`.

        Raises:
            ConfigError: no rail is possible, a rail would use TCP although ``rdma`` is
                ``require``, or the peer's public key or pre-shared key is wrong.
        """
        if peer.process == self.info.process:
            raise ConfigError(
                f"{label} is this process itself: each rank needs a separate process, "
                "or a separate engine (share_engine=False)"
            )
        if not self.engine.has_peer(peer.process):
            try:
                check_confirmation(self.info, peer, self.key)
                secret = self.key_pair.pair_secret(self.info, peer, self.key)
            except ConfigError as error:
                raise ConfigError(f"{label}: {error}") from error
            required = self.config.rdma == "require"
            rails = rails_between(
                self.info,
                peer,
                own_node,
                require_verbs=required,
                wires=wires,
                fallback=self.config.fallback,
            )
            if all(rail["kind"] == "control" or rail["dormant"] for rail in rails):
                _LOG.warning(
                    "%s (host %s): no data rail: %s; calls use the control rail",
                    label,
                    peer.host,
                    no_data_rail(self.info, peer, wires),
                )
            self.engine.add_peer(peer.process, label, secret, rails)


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
            try:
                process.log.start()
            except RuntimeError as error:  # the limit of processes, or no memory for a stack
                _close_observers(process)
                process.engine.close(0.0)
                raise InternalError(
                    f"cannot start the thread that forwards the log: {error}"
                ) from error
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


def _close_observers(process: Process) -> None:
    if process.drills is not None:
        process.drills.close()
    if process.unobserved is not None:
        process.unobserved.close()


def _close(process: Process) -> None:
    _close_observers(process)
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
