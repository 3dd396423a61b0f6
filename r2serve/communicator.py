"""Collectives that survive the loss of a rail.

Tensors are contiguous CPU tensors of torch, or NumPy arrays. A collective's result has the same
bits on every rank, with any algorithm, rail or failure (docs/architecture.md, canonical order). All
ranks must issue the calls of a communicator in the same order. Different communicators are
independent, also across threads. Concurrent calls of the same communicator run one after another.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from r2serve import _core, rendezvous, start, tensors
from r2serve.collectives import Collectives
from r2serve.config import Config
from r2serve.errors import InvalidArgumentError, StartupTimeoutError
from r2serve.faults import canonical, note_on
from r2serve.observe import journal
from r2serve.ports.identity import (
    communicator_id,
    local_address_towards,
    number_nodes,
    part_id,
)
from r2serve.ports.management_address import find_management_address
from r2serve.process import LINGER_S, Process, RailInfo, release, retain
from r2serve.store_meeting import StoreMeeting, shorter_limit

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]

    from r2serve.rendezvous import Exchange
    from r2serve.tensors import Array

_LOG = logging.getLogger("r2serve.r2ccl")
_NOTED: set[str] = set()
"""Deprecated names of faults with a note in the log; a name gets a single note."""


def _call_timeout_s(config: Config | None) -> float:
    return config.call_timeout_s if config else 0.0


def check_step(number: int) -> None:
    """Raises InvalidArgumentError unless ``number`` fits the wire's field for steps."""
    if not 0 < number < 2**32:
        raise InvalidArgumentError(f"number: is {number}; must be from 1 to {2**32 - 1}")


class Stepping(Protocol):
    """A communicator with an open step."""

    def end_step(self) -> None: ...


class StepScope:
    """The scope of a communicator's open step; the end of a ``with`` block ends the step."""

    def __init__(self, communicator: Stepping) -> None:
        self._communicator = communicator

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._communicator.end_step()


class Communicator(Collectives):
    """A group of ranks; every rank makes the communicator in the same way.

    Constructors are :meth:`from_group`, :meth:`from_store` and :meth:`standalone`.
    """

    name: str
    nodes: list[int]
    """Node index of each rank, in order of first appearance."""

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
        self._sites = config.consensus in ("site", "site-error")
        self._process = process
        self._number = number
        self._members = list(members)
        self._release = weakref.finalize(self, release, process)
        self._bound: list[Communicator] = []
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
        """Makes a communicator of the ranks of a torch group; collective over the group.

        Args:
            group: a group with collectives of CPU tensors; used only by this call.
            name: label for logs; the same on all ranks.
            config: default: from the environment.
            management_address: address of this node for control traffic, or a host name. Default:
                ``VLLM_HOST_IP``, ``SGLANG_HOST_IP``, or the address on the route to
                ``MASTER_ADDR``.

        Raises:
            ConfigError: an option or address is wrong, here or on another rank, or ranks on
                different nodes have no rails.
            StartupTimeoutError: on some rank no rail to a peer came up within
                ``connect_timeout_s``.
        """
        rank = torch.distributed.get_rank(group)
        return cls._make(
            rendezvous.over_group(group),
            name,
            rank,
            config,
            lambda: find_management_address(management_address),
        )

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
        """Makes a communicator of ranks with a common store and no torch group.

        Args:
            store: private to this communicator, or shared with communicators of other names.
            name: label for logs and prefix of the store's keys; the same on all ranks.
            management_address: see :meth:`from_group`; without ``MASTER_ADDR`` the default is the
                address on the route to the store.

        Raises:
            ConfigError, StartupTimeoutError: see :meth:`from_group`.
        """
        config = start.resolved(config)
        exchange = StoreMeeting(store, name, rank, world_size, _call_timeout_s(config))
        host = rendezvous.host_of(store)

        def control() -> str | None:
            found = find_management_address(management_address)
            return local_address_towards(host) if found is None and host else found

        return cls._make(exchange, name, rank, config, control)

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
        """Makes a communicator without any engine: rank 0 hosts a store at ``host:port``.

        Args:
            host, port: address of rank 0's store, reachable from all ranks during start-up.
            timeout_s: seconds for all ranks to appear at the store; a shorter ``call_timeout_s``
                takes precedence.
            share_engine: False gives this communicator private links, so that several ranks can
                live in one process.

        Raises:
            InvalidArgumentError: rank or world size is out of range.
            ConfigError, StartupTimeoutError: see :meth:`from_group`.
        """
        if not 0 <= rank < world_size:
            raise InvalidArgumentError(f"rank: {rank} is not within 0 to {world_size - 1}")
        config = start.resolved(config)
        call_timeout_s = _call_timeout_s(config)
        limit_s, limit = shorter_limit(call_timeout_s, timeout_s, "timeout_s")
        try:
            store = TCPStore(
                host,
                port,
                world_size,
                is_master=rank == 0,
                timeout=timedelta(seconds=limit_s),
                wait_for_workers=False,
            )
        except DistError as error:
            if rank == 0:  # no wait: rank 0 cannot host the store
                raise
            first_line = str(error).partition("\n")[0]
            raise StartupTimeoutError(
                f"communicator {name!r}, rank {rank}: rank 0 has no store at {host}:{port} within "
                f"{limit} of {limit_s:g} s ({first_line})"
            ) from error
        exchange = StoreMeeting(store, name, rank, world_size, call_timeout_s)
        try:
            made = cls._make(
                exchange, name, rank, config, lambda: local_address_towards(host), share_engine
            )
        finally:
            exchange.outlive(LINGER_S)
        return made

    @classmethod
    def _make(
        cls,
        exchange: Exchange,
        name: str,
        rank: int,
        config: Config | None,
        control: Callable[[], str | None],
        share_engine: bool = True,
    ) -> Communicator:
        joined = start.join(exchange, rank, config, control, share_engine)
        process = joined.process
        try:
            number = communicator_id(name, joined.numbers, joined.start)
            return cls(process, number, name, rank, joined.numbers, joined.nodes)
        except BaseException:
            release(process)
            raise

    def pair(self, peer: int, name: str) -> Communicator:
        """Makes a communicator of this rank and ``peer``, in rank order.

        Returns at once, without communication, because the links exist already. Messages wait
        until the peer makes the same communicator.

        Args:
            peer: another rank.
            name: the same at both ends, and unique among pairs of this communicator.

        Raises:
            InvalidArgumentError: ``peer`` is not another rank.
        """
        if peer == self.rank or not 0 <= peer < self.world_size:
            raise InvalidArgumentError(
                f"peer: {peer} is not another rank of 0 to {self.world_size - 1}"
            )
        return self.part(sorted((self.rank, peer)), name)

    def twin(self, name: str) -> Communicator:
        """Makes a second communicator of the same ranks with an independent order of calls.

        Returns at once, like :meth:`pair`; ``name`` is the same on all ranks and unique.
        """
        return self.part(range(self.world_size), name)

    def part(self, ranks: Sequence[int], name: str) -> Communicator:
        """Makes a communicator of ``ranks``, in the given order; must include this rank.

        Returns at once, like :meth:`pair`; ``name`` is the same on all ``ranks`` and unique.
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
        """The options of the engine under this communicator."""
        return self._process.config

    @property
    def spans_nodes(self) -> bool:
        """Whether ranks are on several nodes, so that rails carry traffic and can fail over."""
        return len(set(self.nodes)) > 1

    def register_buffer(self, tensor: Array) -> None:
        """Registers a tensor with RDMA devices, for reads and writes in place without a copy.

        Useful for large tensors over verbs rails; without effect on TCP rails. A tensor used as
        both input and output of a call is still copied. The memory must not move or be freed
        before :meth:`deregister_buffer`, which each registration needs once.

        Raises:
            InternalError: a device refuses, for example because of the memlock limit.
            InvalidArgumentError: another buffer begins at the same address.
        """
        data, _ = tensors.checked("tensor", tensor)
        self._process.engine.register_buffer(data.data_ptr(), data.nbytes)

    def deregister_buffer(self, tensor: Array) -> None:
        """Ends :meth:`register_buffer`; call before the memory is freed.

        Raises:
            InvalidArgumentError: the tensor is not registered.
        """
        data, _ = tensors.checked("tensor", tensor)
        self._process.engine.deregister_buffer(data.data_ptr())

    def step(self, number: int, about: str = "") -> StepScope:
        """Ends the open step and begins step ``number``; all ranks call.

        At the end of a step the ranks compare the step and their numbers of calls. So a call that
        one rank skips is found in that step, before the results are used. Use the result in a
        ``with`` statement, or call :meth:`end_step`. Without effect unless ``R2CCL_CONSENSUS`` is
        ``step``, ``site`` or ``site-error``.

        Args:
            number: 1 to 4294967295, the same on all ranks.
            about: text for errors, for example the ids of the requests. A long text is cut.

        Raises:
            InvalidArgumentError: ``number`` is out of range.
            OrderMismatchError: the ranks' programs have parted; the text has the position of every
                rank. Sticky, like the errors of a collective.
        """
        check_step(number)
        self._core.begin_step(number, about, True)
        return StepScope(self)

    def mark_step(self, number: int, about: str = "") -> None:
        """Begins step ``number`` without a comparison at the end of the step before.

        For stages of a pipeline, which are at different steps and must not wait for each other.
        Messages carry the step and are compared on arrival. Arguments and errors: :meth:`step`.
        """
        check_step(number)
        self._core.begin_step(number, about, False)

    def post_position(self) -> None:
        """Sends the position after the last call of the step; all ranks call.

        :meth:`end_step` then need not wait for a rank that is busy after its last call. No rank
        may make a call between both. Errors: see :meth:`step`.
        """
        self._core.post_position()

    def end_step(self) -> None:
        """Ends the open step; see :meth:`step`. Without an open step nothing happens.

        Raises:
            OrderMismatchError: see :meth:`step`.
        """
        self._core.end_step()

    # ---- lifecycle and observation ----

    def abort(self, reason: str) -> None:
        """Ends the current call and all later calls with AbortedError. Thread-safe.

        The other ranks receive a notice and end in the same way. Communicators of :meth:`bind` end,
        too.
        """
        for communicator in tuple(self._bound):
            communicator.abort(reason)
        self._core.abort(f"rank {self.rank} gave up: {reason}")

    def bind(self, other: Communicator) -> None:
        """Makes :meth:`abort` end ``other``, too, where other ranks may wait for this rank."""
        self._bound.append(other)

    def close(self) -> None:
        """Closes gracefully: waits for delivery of sent data, at most 5 s. Idempotent."""
        if self._release.alive:
            self._core.close(LINGER_S)
            self._release()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rails(self) -> list[RailInfo]:
        """Returns the rails of this process, over all links."""
        return [RailInfo(**rail) for rail in self._process.engine.rails()]

    def events(self) -> list[journal.Event]:
        """Returns this process's journal, oldest event first."""
        return journal.parse(self._process.engine.journal_bytes()).events

    def inject(
        self, rail_index: int, fault: str, peer: int | None = None, *, bytes_per_s: float = 0.0
    ) -> None:
        """Injects a fault into a rail of this process, for tests and drills.

        Args:
            rail_index: position of the rail in its link.
            fault: a kind of ``r2serve.faults``: ``carrier_loss``, ``black_hole``, ``reset`` (once),
                ``slow``, ``corrupt`` (wrong checksums); or ``heal``.
            peer: rank of the peer; default: the rail of this index to every peer.
            bytes_per_s: rate of a ``slow`` rail, bytes/s; at least 1e6.

        Raises:
            ValueError, InvalidArgumentError: unknown fault or rail; ``corrupt`` without checksums.
        """
        if fault not in _NOTED and (note := note_on(fault)):
            _NOTED.add(fault)
            _LOG.warning("inject: %s", note)
        process = 0 if peer is None else self._members[peer]
        self._process.engine.inject(rail_index, canonical(fault), process, bytes_per_s)
