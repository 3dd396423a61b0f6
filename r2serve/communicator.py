"""Collectives that outlive a rail.

Tensors are CPU tensors of torch or NumPy arrays, contiguous.  Every collective gives the same bits
on every rank, whatever algorithm, rail or failure carried it (docs/architecture.md, canonical
reduction tree).  Calls of one communicator must come in the same order on all its ranks; different
communicators are independent, also from different threads.
"""

from __future__ import annotations

import itertools
import json
import logging
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from r2serve import _core, tensors
from r2serve.config import Config
from r2serve.errors import InvalidArgumentError
from r2serve.observe import journal
from r2serve.process import LINGER_S, Process, RailInfo, acquire, release
from r2serve.topology import (
    ProcessInfo,
    communicator_id,
    engine_address,
    local_address_towards,
    number_nodes,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from r2serve.tensors import Array

_LOG = logging.getLogger("r2serve.r2ccl")

_Exchange = Callable[[dict[str, Any]], list[dict[str, Any]]]


class Communicator:
    """A group of ranks.  Made by :meth:`from_group` or :meth:`standalone`, on every rank alike."""

    rank: int
    world_size: int
    name: str
    nodes: list[int]
    """Node of each rank, numbered by first appearance."""

    _store: TCPStore | None = None  # rank 0's must outlive everybody's start-up

    def __init__(
        self,
        process: Process,
        name: str,
        rank: int,
        members: Sequence[ProcessInfo],
        exchange: _Exchange,
    ) -> None:
        config = process.config
        self.rank = rank
        self.world_size = len(members)
        self.name = name
        self.nodes = number_nodes([member.node for member in members])
        self._process = process
        for other, member in enumerate(members):
            if other != rank:
                process.add_peer(member, f"rank {other}", self.nodes[rank])
        processes = [member.process for member in members]
        self._members = processes
        peers = [number for number in processes if number != process.info.process]
        exchange({})  # everybody knows everybody: from here on nobody is a stranger
        process.engine.connect(peers, config.connect_timeout_s)
        self._core = _core.Communicator(
            process.engine,
            communicator_id(process.info.process, name, processes),
            name,
            rank,
            processes,
            self.nodes,
            config.simd,
        )
        self._all_reduce = self._core.all_reduce
        self._release = weakref.finalize(self, release, process)
        _LOG.info(
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
        cls, group: ProcessGroup, *, name: str, config: Config | None = None
    ) -> Communicator:
        """Make a communicator of the ranks of a torch group; collective over the group.

        Args:
            group: a group that can exchange Python objects (any CPU group); used only here.
            name: for people; the same on all ranks.
            config: default: from the environment.

        Raises:
            ConfigError: an option is wrong, or ranks on different nodes have no rails.
            StartupTimeoutError: no rail to a peer came up within ``connect_timeout_s``.
        """
        rank = torch.distributed.get_rank(group)
        world_size = torch.distributed.get_world_size(group)

        def exchange(own: dict[str, Any]) -> list[dict[str, Any]]:
            gathered: list[Any] = [None] * world_size
            torch.distributed.all_gather_object(gathered, own, group=group)
            return gathered

        return cls._make(exchange, name, rank, config, engine_address())

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

        rounds = itertools.count()

        def exchange(own: dict[str, Any]) -> list[dict[str, Any]]:
            key = f"r2ccl/{name}/{next(rounds)}"
            store.set(f"{key}/{rank}", json.dumps(own))
            return [json.loads(store.get(f"{key}/{r}")) for r in range(world_size)]

        made = cls._make(exchange, name, rank, config, local_address_towards(host), share_engine)
        made._store = store
        return made

    @classmethod
    def _make(
        cls,
        exchange: _Exchange,
        name: str,
        rank: int,
        config: Config | None,
        management_address: str | None,
        share_engine: bool = True,
    ) -> Communicator:
        config = config or Config.from_env()
        process = acquire(config, rank, management_address, share_engine)
        try:
            members = [ProcessInfo.from_wire(wire) for wire in exchange(process.info.to_wire())]
            return cls(process, name, rank, members, exchange)
        except BaseException:
            release(process)
            raise

    @property
    def spans_nodes(self) -> bool:
        """Whether ranks are on more than one node, so that there are rails to fail over between."""
        return len(set(self.nodes)) > 1

    # --- collectives --------------------------------------------------------------------------

    def all_reduce(
        self,
        tensor: Array,
        op: str = "sum",
        *,
        out: Array | None = None,
        algorithm: str | None = None,
    ) -> Array:
        """Combine the tensors of all ranks element by element.

        Args:
            tensor: any shape; the same shape and dtype on all ranks.
            op: ``sum``, ``prod``, ``min``, ``max`` or ``avg`` (integers: truncated).
            out: like ``tensor``; may be ``tensor`` itself.  Default: a new tensor.
            algorithm: ``one_shot`` or ``two_shot`` forces one; it changes no bit.

        Returns:
            ``out``.

        Raises:
            InvalidArgumentError: before anything was sent.
            OrderMismatchError, PeerLostError, PeerClosedError, AbortedError: sticky.
        """
        given = tensor
        if type(tensor) is not torch.Tensor:
            tensor = tensors.as_tensor(tensor)
        if out is None:
            target = torch.empty_like(tensor)
        elif out is given:
            target = tensor
        else:
            target = tensors.output(out, tensor.shape, tensor)
        code = tensors.DTYPES.get(tensor.dtype)
        if code is None or not tensor.is_contiguous() or not tensor.is_cpu:
            raise tensors.unusable("tensor", tensor)
        try:
            op_code, algorithm_code = tensors.OPS[op], tensors.ALGORITHMS[algorithm]
        except KeyError:
            raise tensors.unknown_name(op, algorithm) from None
        self._all_reduce(
            tensor.data_ptr(), target.data_ptr(), tensor.numel(), code, op_code, algorithm_code
        )
        return tensors.like(given, target, out)

    def all_gather(self, tensor: Array, *, out: Array | None = None) -> Array:
        """Collect the tensors of all ranks: ``out[r]`` is rank r's, shape ``(world, *shape)``."""
        source, code = tensors.checked("tensor", tensor)
        shape = (self.world_size, *source.shape)
        target = tensors.target(out, shape, source, -self.rank * source.nbytes)
        self._core.all_gatherv(
            source.data_ptr(), target.data_ptr(), [source.numel()] * self.world_size, code
        )
        return tensors.like(tensor, target, out)

    def all_gatherv(
        self, tensor: Array, sizes: Sequence[int], *, out: Array | None = None
    ) -> Array:
        """Collect along dimension 0; rank r brings ``sizes[r]`` rows.  All ranks pass ``sizes``."""
        source, code = tensors.checked("tensor", tensor)
        row = self._check_rows("tensor", source, sizes, own=True)
        at = -sum(sizes[: self.rank]) * row * source.element_size()
        target = tensors.target(out, (sum(sizes), *source.shape[1:]), source, at)
        self._core.all_gatherv(
            source.data_ptr(), target.data_ptr(), [size * row for size in sizes], code
        )
        return tensors.like(tensor, target, out)

    def reduce_scatter(self, tensor: Array, op: str = "sum", *, out: Array | None = None) -> Array:
        """Combine as all_reduce and keep this rank's even share of dimension 0.

        Raises:
            InvalidArgumentError: dimension 0 is not divisible by the world size.
        """
        source, _ = tensors.checked("tensor", tensor)
        rows = source.shape[0] if source.dim() else 0
        if source.dim() == 0 or rows % self.world_size:
            raise InvalidArgumentError(
                f"tensor: dimension 0 of shape {tuple(source.shape)} is not divisible by the "
                f"world size {self.world_size}"
            )
        return self.reduce_scatterv(
            tensor, [rows // self.world_size] * self.world_size, op, out=out
        )

    def reduce_scatterv(
        self, tensor: Array, sizes: Sequence[int], op: str = "sum", *, out: Array | None = None
    ) -> Array:
        """As reduce_scatter; rank r keeps ``sizes[r]`` rows.  All ranks pass ``sizes``."""
        source, code = tensors.checked("tensor", tensor)
        row = self._check_rows("tensor", source, sizes, own=False)
        at = sum(sizes[: self.rank]) * row * source.element_size()
        target = tensors.target(out, (sizes[self.rank], *source.shape[1:]), source, at)
        if op not in tensors.OPS:
            raise tensors.unknown_name(op, None)
        counts = [size * row for size in sizes]
        self._core.reduce_scatterv(
            source.data_ptr(), target.data_ptr(), counts, code, tensors.OPS[op]
        )
        return tensors.like(tensor, target, out)

    def broadcast(self, tensor: Array, root: int) -> Array:
        """Copy rank ``root``'s tensor to all ranks, in place."""
        data, code = tensors.checked("tensor", tensor)
        self._core.broadcast(data.data_ptr(), data.numel(), code, root)
        return tensor

    def gather(self, tensor: Array, root: int, *, out: Array | None = None) -> Array | None:
        """Collect the tensors of all ranks on ``root``: ``(world, *shape)``; None elsewhere."""
        source, code = tensors.checked("tensor", tensor)
        counts = [source.numel()] * self.world_size
        if self.rank != root:
            self._core.gather(source.data_ptr(), 0, counts, code, root)
            return None
        at = -root * source.nbytes
        target = tensors.target(out, (self.world_size, *source.shape), source, at)
        self._core.gather(source.data_ptr(), target.data_ptr(), counts, code, root)
        return tensors.like(tensor, target, out)

    def all_to_all(self, tensor: Array, *, out: Array | None = None) -> Array:
        """Send the r-th even share of dimension 0 to rank r; receive in rank order."""
        source, _ = tensors.checked("tensor", tensor)
        if source.dim() == 0 or source.shape[0] % self.world_size:
            raise InvalidArgumentError(
                f"tensor: dimension 0 of shape {tuple(source.shape)} is not divisible by the "
                f"world size {self.world_size}"
            )
        even = [source.shape[0] // self.world_size] * self.world_size
        return self.all_to_allv(tensor, even, even, out=out)

    def all_to_allv(
        self,
        tensor: Array,
        in_sizes: Sequence[int],
        out_sizes: Sequence[int],
        *,
        out: Array | None = None,
    ) -> Array:
        """Send ``in_sizes[r]`` rows to rank r; receive ``out_sizes[r]`` rows from it, in order."""
        source, code = tensors.checked("tensor", tensor)
        row = self._check_rows("tensor", source, in_sizes, own=False)
        self._check_sizes("out_sizes", out_sizes)
        target = tensors.target(out, (sum(out_sizes), *source.shape[1:]), source)
        self._core.all_to_allv(
            source.data_ptr(),
            [size * row for size in in_sizes],
            target.data_ptr(),
            [size * row for size in out_sizes],
            code,
        )
        return tensors.like(tensor, target, out)

    def send(self, tensor: Array, dst: int) -> None:
        """Send to one rank; returns when ``tensor`` may be changed again."""
        source, code = tensors.checked("tensor", tensor)
        self._core.send(source.data_ptr(), source.numel(), code, dst)

    def recv(self, tensor: Array, src: int) -> Array:
        """Receive what ``src`` sends, into ``tensor``."""
        target, code = tensors.checked("tensor", tensor)
        self._core.recv(target.data_ptr(), target.numel(), code, src)
        return tensor

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self._core.barrier()

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

    def inject(self, rail_index: int, fault: str, peer: int | None = None) -> None:
        """Inject a fault into a rail of this process, for tests and drills.

        Args:
            rail_index: position of the rail in its link.
            fault: ``cut`` (as if its carrier was lost), ``drop`` (a silent black hole),
                ``error`` (its transport fails, once), ``heal``.
            peer: rank; default: the rails of all peers.
        """
        process = 0 if peer is None else self._members[peer]
        self._process.engine.inject(rail_index, fault, process)

    # --- checks -------------------------------------------------------------------------------

    def _check_sizes(self, field: str, sizes: Sequence[int]) -> None:
        if len(sizes) != self.world_size or any(size < 0 for size in sizes):
            raise InvalidArgumentError(
                f"{field}: {list(sizes)} is not one size (0 or more) for each of "
                f"{self.world_size} ranks"
            )

    def _check_rows(
        self, field: str, tensor: torch.Tensor, sizes: Sequence[int], *, own: bool
    ) -> int:
        """Elements of one row; checks that dimension 0 is the own size, or all of them."""
        self._check_sizes("sizes", sizes)
        expected = sizes[self.rank] if own else sum(sizes)
        if tensor.dim() == 0 or tensor.shape[0] != expected:
            raise InvalidArgumentError(
                f"{field}: shape {tuple(tensor.shape)} where sizes {list(sizes)} ask for "
                f"{expected} rows"
            )
        row = 1
        for extent in tensor.shape[1:]:
            row *= extent
        return row
