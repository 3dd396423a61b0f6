"""Collectives on a GPU's memory that outlive a rail, also inside captured CUDA graphs.

A call puts kernels into torch's current stream, as NCCL's do, and returns; the work is done when
the stream has come to it.  Kernels stage the input in pinned memory of the host, or in memory of
the GPU that NICs reach, and wait for the result; a thread of the host carries it over the rails.
So a captured graph needs no Python when it is replayed, and a rail that dies in the middle of a
replay is the host's business alone.

What a lost peer would have sent never comes: kernels end without results, and :meth:`check` raises
why.  It has to be asked before results are given to anybody.
"""

from __future__ import annotations

import functools
import logging
import math
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from r2serve import _core, tensors
from r2serve.collectives import Collectives
from r2serve.communicator import Communicator
from r2serve.config import Config
from r2serve.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from r2serve.fused import FusedReduce
    from r2serve.observe import journal
    from r2serve.process import RailInfo
    from r2serve.tensors import Array

_LOG = logging.getLogger("r2serve.r2ccl")
_OPEN: weakref.WeakSet[DeviceCommunicator] = weakref.WeakSet()


def check_all() -> None:
    """Raise why results of one of this process's communicators are void, if they are.

    Raises:
        PeerLostError, PeerClosedError, AbortedError, OrderMismatchError: sticky.
    """
    for communicator in tuple(_OPEN):
        communicator.check()


def wake_all() -> None:
    """Say that graphs are about to be replayed: nobody tells the host otherwise."""
    for communicator in tuple(_OPEN):
        communicator.wake()


class DeviceCommunicator(Collectives):
    """A group of ranks with tensors on GPUs, made on every rank alike.

    Its methods are those of :class:`r2serve.Communicator`, for contiguous tensors on ``device``.
    Calls on different streams have to be put in order by the caller (``Stream.wait_stream``).  A
    captured graph may be replayed for ever; it is not to be replayed beside other calls.
    """

    def __init__(self, host: Communicator, device: torch.device) -> None:
        """Collective over the ranks of ``host``, which is closed with this one.

        Args:
            device: of this process; tensors of all calls are there.

        Raises:
            ConfigError: ranks have different ``gpu_staging_bytes``, ``gpu_direct`` or
                ``gpu_direct_min_bytes``.
            InvalidArgumentError: the device or this build of r2serve does not do, or ``gpu_direct``
                is on and cannot be used.
            InternalError: the driver refuses something, in its words.
        """
        device = torch.empty(0, device=device).device  # with its index
        _agree(host)
        twin = host.twin(f"{host.name}/device")
        nodes, inter_node = _inter_node_group(host)
        self._parts = [twin] if inter_node is None else [twin, inter_node]
        index = 0 if device.index is None else device.index
        try:
            self._stream_core = _core.StreamCommunicator(
                twin._core,
                host.config.cuda_library,
                index,
                host.config.gpu_staging_bytes,
                None if inter_node is None else inter_node._core,
                nodes,
                host.config.gpu_direct,
                host.config.gpu_direct_min_bytes,
            )
        except BaseException:
            for part in self._parts:
                part.close()
            raise
        if inter_node is not None:
            why_not = self._stream_core.exchange()
            _LOG.info(
                "communicator %s: %s",
                host.name,
                f"ranks of a node do not exchange what they have: {why_not}"
                if why_not
                else f"{len(nodes[0])} ranks of each node exchange before and behind the rails",
            )
        why_not = self._stream_core.direct()
        _LOG.info(
            "communicator %s: %s",
            host.name,
            f"staged in pinned memory of the host: {why_not}"
            if why_not
            else f"staged in the GPU's memory (GPUDirect) from {host.config.gpu_direct_min_bytes} "
            "bytes on",
        )
        self._stream = _current_stream(device)
        core: Any = _InStream(self._stream_core, self._stream)
        super().__init__(core, host.rank, host.world_size, device)
        self.host = host
        self.name = host.name
        self.nodes = host.nodes
        self.algorithm = host.algorithm
        host.barrier()  # where ranks share a GPU, work of one keeps others from being made
        self._close = weakref.finalize(self, _close, self._stream_core, [*self._parts, host])
        _OPEN.add(self)

    @classmethod
    def from_group(
        cls,
        group: ProcessGroup,
        *,
        name: str,
        device: torch.device,
        config: Config | None = None,
        management_address: str | None = None,
    ) -> DeviceCommunicator:
        """Make a communicator of the ranks of a torch group, as ``Communicator.from_group``."""
        host = Communicator.from_group(
            group, name=name, config=config, management_address=management_address
        )
        try:
            return cls(host, device)
        except BaseException:
            host.close()
            raise

    def all_to_all(self, tensor: Array, *, out: Array | None = None) -> Array:
        """As ``Communicator.all_to_all``; in the stream."""
        source, code = tensors.checked("tensor", tensor, self.device)
        rows = self._even_rows(source)
        target = tensors.target(out, source.shape, source)
        self._stream_core.all_to_all(
            self._stream(),
            source.data_ptr(),
            target.data_ptr(),
            rows[0] * math.prod(source.shape[1:]),
            code,
        )
        return tensors.like(tensor, target, out)

    def all_to_allv(
        self,
        tensor: Array,
        in_sizes: Sequence[int],
        out_sizes: Sequence[int],
        *,
        out: Array | None = None,
    ) -> Array:
        """As ``Communicator.all_to_allv``, through memory of the host: it cannot be captured.

        No rank knows how much others exchange, so none can know in how many slices they do.
        """
        source, _ = tensors.checked("tensor", tensor, self.device)
        tensors.check_sizes("out_sizes", out_sizes, self.world_size)
        shape = (sum(out_sizes), *source.shape[1:])
        target = tensors.target(out, shape, source)
        received = self.host.all_to_allv(source.cpu(), in_sizes, out_sizes)
        target.view(shape).copy_(tensors.as_tensor(received))
        return tensors.like(tensor, target, out)

    @functools.cached_property
    def fused(self) -> FusedReduce:
        """The collectives that end in a kernel of :mod:`r2serve.kernels`.

        Raises:
            ImportError: Triton is not installed.
        """
        from r2serve.fused import FusedReduce

        return FusedReduce(self._stream_core, self._stream, self.nodes, self.device)

    @property
    def spans_nodes(self) -> bool:
        """Whether ranks are on more than one node, so that there are rails to fail over between."""
        return self.host.spans_nodes

    def check(self) -> None:
        """Raise why no more results come, and those since are void, if so.

        To be called when the stream has been waited for.

        Raises:
            PeerLostError, PeerClosedError, AbortedError, OrderMismatchError: sticky.
        """
        self._stream_core.check()

    def wake(self) -> None:
        """Say that a graph is about to be replayed, so that the host looks without a pause."""
        self._stream_core.wake()

    def abort(self, reason: str) -> None:
        """Give up, from any thread; the other ranks are told, and end likewise."""
        for communicator in (*self._parts, self.host):
            communicator.abort(reason)

    def close(self) -> None:
        """Wait for what is in the streams, and leave.  Idempotent."""
        _OPEN.discard(self)
        self._close()

    def __enter__(self) -> DeviceCommunicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rails(self) -> list[RailInfo]:
        """The rails of this process, over all its links."""
        return self.host.rails()

    def events(self) -> list[journal.Event]:
        """This process's journal, oldest first."""
        return self.host.events()

    def inject(
        self, rail_index: int, fault: str, peer: int | None = None, *, bytes_per_s: float = 0.0
    ) -> None:
        """Inject a fault into a rail of this process: as ``Communicator.inject``."""
        self.host.inject(rail_index, fault, peer, bytes_per_s=bytes_per_s)


class _InStream:
    """The core's collectives with the signatures of the host's, put into the current stream."""

    def __init__(self, core: _core.StreamCommunicator, stream: Callable[[], int]) -> None:
        self._core = core
        self._stream = stream

    def all_reduce(self, *arguments: Any) -> None:
        self._core.all_reduce(self._stream(), *arguments)

    def all_gatherv(self, *arguments: Any) -> None:
        self._core.all_gatherv(self._stream(), *arguments)

    def reduce_scatterv(self, *arguments: Any) -> None:
        self._core.reduce_scatterv(self._stream(), *arguments)

    def broadcast(self, *arguments: Any) -> None:
        self._core.broadcast(self._stream(), *arguments)

    def gather(self, *arguments: Any) -> None:
        self._core.gather(self._stream(), *arguments)

    def send(self, *arguments: Any) -> None:
        self._core.send(self._stream(), *arguments)

    def recv(self, *arguments: Any) -> None:
        self._core.recv(self._stream(), *arguments)

    def barrier(self) -> None:
        self._core.barrier(self._stream())


def _current_stream(device: torch.device) -> Callable[[], int]:
    """Of torch; where tensors of the device are the host's own, the driver's default stream."""
    if device.type == "cpu":
        return lambda: 0
    return lambda: torch.cuda.current_stream(device).cuda_stream


def _agree(host: Communicator) -> None:
    """Ranks whose options differ would wait for each other: ConfigError, on all of them."""
    names = ("gpu_staging_bytes", "gpu_direct", "gpu_direct_min_bytes")
    choices = ("auto", "on", "off")
    own = [
        choices.index(value) if isinstance(value, str) else value
        for value in (getattr(host.config, name) for name in names)
    ]
    table = tensors.as_tensor(host.all_gather(torch.tensor([own], device=tensors.CPU)))
    for column, name in enumerate(names):
        theirs = [int(value) for value in table.view(-1, len(names))[:, column]]
        if len(set(theirs)) == 1:
            continue
        said = [choices[value] if name == "gpu_direct" else value for value in theirs]
        raise ConfigError(
            f"{name} (R2CCL_{name.upper()}) is {getattr(host.config, name)} here, and {said} on "
            "the ranks in order: it must be the same on all"
        )


def _inter_node_group(host: Communicator) -> tuple[list[list[int]], Communicator | None]:
    """The ranks of each node, by local rank, and a communicator of those with this local rank.

    None: this is no job of several nodes that have several ranks each, all of them as many.
    """
    members: dict[object, list[int]] = {}
    for rank, node in enumerate(host.nodes):
        members.setdefault(node, []).append(rank)
    nodes = list(members.values())
    if len(nodes) == 1 or len(nodes[0]) == 1 or len({len(each) for each in nodes}) > 1:
        return nodes, None
    local_rank = members[host.nodes[host.rank]].index(host.rank)
    return nodes, host.part([each[local_rank] for each in nodes], f"{host.name}/place{local_rank}")


def _close(core: _core.StreamCommunicator, communicators: Sequence[Communicator]) -> None:
    core.close()
    for communicator in communicators:
        communicator.close()
