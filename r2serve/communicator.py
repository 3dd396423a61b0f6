"""Collectives that outlive a rail.

Tensors are CPU tensors of torch or NumPy arrays, contiguous.  Every collective gives the same bits
on every rank, whatever algorithm, rail or failure carried it (docs/architecture.md, canonical
reduction tree).  Calls of one communicator must come in the same order on all its ranks; different
communicators are independent, also from different threads.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from r2serve import _core, rendezvous, tensors
from r2serve.collectives import Collectives
from r2serve.config import Config
from r2serve.errors import InvalidArgumentError, R2cclError, StartupTimeoutError
from r2serve.faults import canonical
from r2serve.observe import journal
from r2serve.ports.identity import (
    address_towards_master,
    communicator_id,
    local_address_towards,
    number_nodes,
    part_id,
)
from r2serve.ports.pairing import ProcessInfo
from r2serve.process import LINGER_S, Process, RailInfo, acquire, release, retain

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]

    from r2serve.rendezvous import Exchange
    from r2serve.tensors import Array

_LOG = logging.getLogger("r2serve.r2ccl")


def _connect(exchange: Exchange, process: Process, peers: list[int]) -> None:
    """Bring up the links to all peers; returns when all ranks have theirs.

    One that went on earlier might be gone again before a slower one has seen its rails come up.
    """
    failure = None
    try:
        process.engine.connect(peers, process.config.connect_timeout_s)
    except R2cclError as error:
        failure = error
    outcomes = exchange({"failed": None if failure is None else str(failure)})
    if failure is not None:
        raise failure
    for rank, outcome in enumerate(outcomes):
        if outcome["failed"] is not None:
            raise StartupTimeoutError(f"rank {rank} did not connect: {outcome['failed']}")


class Communicator(Collectives):
    """A group of ranks, made on every rank alike.

    By :meth:`from_group`, :meth:`from_store` or :meth:`standalone`.
    """

    name: str
    nodes: list[int]
    """Node of each rank, numbered by first appearance."""

    def __init__(
        self,
        process: Process,
        number: int,
        name: str,
        rank: int,
        members: Sequence[int],
        nodes: Sequence[int],
    ) -> None:
        config = process.config
        core = _core.Communicator(
            process.engine, number, name, rank, list(members), list(nodes), config.simd
        )
        super().__init__(core, rank, len(members))
        self.name = name
        self.nodes = list(nodes)
        self.algorithm = config.algorithm
        self._process = process
        self._number = number
        self._members = list(members)
        self._release = weakref.finalize(self, release, process)
        _LOG.debug(
            "communicator %s: rank %d of %d on %d node(s), algorithm %s, resilience %s",
            name,
            rank,
            self.world_size,
            len(set(self.nodes)),
            config.algorithm,
            "on" if config.resilience else "OFF",
        )

    @classmethod
    def from_group(
        cls,
        group: ProcessGroup,
        *,
        name: str,
        config: Config | None = None,
        management_address: str | None = None,
    ) -> Communicator:
        """Make a communicator of the ranks of a torch group; collective over the group.

        Args:
            group: a group that can exchange Python objects (any CPU group); used only here.
            name: for people; the same on all ranks.
            config: default: from the environment.
            management_address: this node's numeric address on the management NIC, which is kept
                free of rails. Default: the address on the way to ``MASTER_ADDR``, if that is set.

        Raises:
            ConfigError: an option is wrong, or ranks on different nodes have no rails.
            StartupTimeoutError: no rail to a peer came up within ``connect_timeout_s``, here or at
                another rank.
        """
        rank = torch.distributed.get_rank(group)
        management = management_address or address_towards_master()
        return cls._make(rendezvous.over_group(group), name, rank, config, management)

    @classmethod
    def from_store(
        cls,
        store: Store,
        rank: int,
        world_size: int,
        *,
        name: str,
        config: Config | None = None,
        management_address: str | None = None,
    ) -> Communicator:
        """Make a communicator of ranks that share a store and nothing else yet.

        Args:
            store: of this communicator alone, or of others with other names, too.
            name: for people and for the store's keys; the same on all ranks.
            management_address: as of :meth:`from_group`; then the address on the way to the store.

        Raises:
            ConfigError, StartupTimeoutError: as :meth:`from_group`.
        """
        exchange = rendezvous.over_store(store, name, rank, world_size)
        host = rendezvous.host_of(store)
        management = management_address or address_towards_master()
        if management is None and host:
            management = local_address_towards(host)
        return cls._make(exchange, name, rank, config, management)

    @classmethod
    def standalone(
        cls,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        *,
        name: str = "default",
        config: Config | None = None,
        timeout_s: float = 60.0,
        share_engine: bool = True,
    ) -> Communicator:
        """Make a communicator without any engine: rank 0 hosts a store at ``host:port``.

        Args:
            host, port: where all ranks reach rank 0's store during start-up.
            timeout_s: for all ranks to appear at the store.
            share_engine: False gives this communicator links of its own, so that several ranks
                can live in one process.

        Raises:
            InvalidArgumentError: rank or world size is out of range.
            ConfigError, StartupTimeoutError: as :meth:`from_group`.
        """
        if not 0 <= rank < world_size:
            raise InvalidArgumentError(f"rank: {rank} is not within 0 to {world_size - 1}")
        store = TCPStore(
            host,
            port,
            world_size,
            is_master=rank == 0,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )

        exchange = rendezvous.over_store(store, name, rank, world_size)
        try:
            made = cls._make(
                exchange, name, rank, config, local_address_towards(host), share_engine
            )
        finally:
            rendezvous.outlive(store, name, rank, world_size, LINGER_S)
        return made

    @classmethod
    def _make(
        cls,
        exchange: Exchange,
        name: str,
        rank: int,
        config: Config | None,
        management_address: str | None,
        share_engine: bool = True,
    ) -> Communicator:
        config = config or Config.from_env()
        process = acquire(config, rank, management_address, share_engine)
        try:
            infos = [ProcessInfo.from_wire(wire) for wire in exchange(process.info.to_wire())]
            nodes = number_nodes([info.node for info in infos])
            for other, info in enumerate(infos):
                if other != rank:
                    process.add_peer(info, f"rank {other}", nodes[rank])
            exchange({})  # everybody knows everybody: from here on nobody is a stranger
            own = process.info.process
            members = [info.process for info in infos]
            _connect(exchange, process, [number for number in members if number != own])
            number = communicator_id(own, name, members)
            return cls(process, number, name, rank, members, nodes)
        except BaseException:
            release(process)
            raise

    def pair(self, peer: int, name: str) -> Communicator:
        """Make a communicator of this rank and ``peer``, in the order of their ranks.

        At once, without a word from the peer, over the links that are there: what is sent before
        the peer makes it, too, waits for that.

        Args:
            peer: another rank.
            name: the same at both ends, and of one pair of this communicator only.

        Raises:
            InvalidArgumentError: ``peer`` is no other rank.
        """
        if peer == self.rank or not 0 <= peer < self.world_size:
            raise InvalidArgumentError(
                f"peer: {peer} is not another rank of 0 to {self.world_size - 1}"
            )
        return self.part(sorted((self.rank, peer)), name)

    def twin(self, name: str) -> Communicator:
        """Make another communicator of the same ranks, whose calls have an order of their own.

        At once, as :meth:`pair`; ``name`` is the same on all ranks, and of one twin only.
        """
        return self.part(range(self.world_size), name)

    def part(self, ranks: Sequence[int], name: str) -> Communicator:
        """Make a communicator of ``ranks``, this one among them, in that order.

        At once, as :meth:`pair`; ``name`` is the same on all of them, and of one part only.
        """
        retain(self._process)
        try:
            return Communicator(
                self._process,
                part_id(self._number, name, ranks),
                name,
                ranks.index(self.rank),
                [self._members[rank] for rank in ranks],
                number_nodes([str(self.nodes[rank]) for rank in ranks]),
            )
        except BaseException:
            release(self._process)
            raise

    @property
    def config(self) -> Config:
        """The options of the engine that carries it."""
        return self._process.config

    @property
    def spans_nodes(self) -> bool:
        """Whether ranks are on more than one node, so that there are rails to fail over between."""
        return len(set(self.nodes)) > 1

    def register_buffer(self, tensor: Array) -> None:
        """Let RDMA devices read a tensor where it lies and put results into it, without a copy.

        Large tensors gain by it; TCP rails are indifferent, and what is input and output at once is
        copied.  It must stay where it is, and be given back with :meth:`deregister_buffer` as often
        as it was registered.

        Raises:
            InternalError: a device refuses, for want of lockable memory perhaps.
            InvalidArgumentError: another buffer begins there.
        """
        data, _ = tensors.checked("tensor", tensor)
        self._process.engine.register_buffer(data.data_ptr(), data.nbytes)

    def deregister_buffer(self, tensor: Array) -> None:
        """End :meth:`register_buffer`, before the memory is freed.

        Raises:
            InvalidArgumentError: it is not registered.
        """
        data, _ = tensors.checked("tensor", tensor)
        self._process.engine.deregister_buffer(data.data_ptr())

    # --- life and observation -----------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """Give up, from any thread: the call in progress and all later ones end in AbortedError.

        The other ranks are told, and end likewise.
        """
        self._core.abort(f"rank {self.rank} gave up: {reason}")

    def close(self) -> None:
        """Leave, after everything sent has been delivered (bounded).  Idempotent."""
        if self._release.alive:
            self._core.close(LINGER_S)
            self._release()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rails(self) -> list[RailInfo]:
        """The rails of this process, over all its links."""
        return [RailInfo(**rail) for rail in self._process.engine.rails()]

    def events(self) -> list[journal.Event]:
        """This process's journal, oldest first."""
        return journal.parse(self._process.engine.journal_bytes()).events

    def inject(
        self, rail_index: int, fault: str, peer: int | None = None, *, bytes_per_s: float = 0.0
    ) -> None:
        """Inject a fault into a rail of this process, for tests and drills.

        Args:
            rail_index: position of the rail in its link.
            fault: a kind of ``r2serve.faults``: ``carrier_loss``, ``black_hole``, ``reset`` (once),
                ``slow``, ``corrupt`` (wrong checksums); or ``heal``.
            peer: rank; default: the rails of all peers.
            bytes_per_s: that a ``slow`` rail sends; at least 1e6.

        Raises:
            ValueError, InvalidArgumentError: no such fault, or rail; ``corrupt`` without checksums.
        """
        process = 0 if peer is None else self._members[peer]
        self._process.engine.inject(rail_index, canonical(fault), process, bytes_per_s)
