"""Collectives on GPU memory that survive the loss of a rail, also inside captured CUDA graphs.

A call enqueues kernels on torch's current stream, as NCCL does, and returns. The work is done when
the stream has passed the kernels. Kernels stage the input in pinned host memory, or in GPU memory
registered with NICs, and wait for the result; a host thread carries the data over the rails.
So a replayed graph needs no Python, and only the host handles a rail that dies during a replay.

Kernels end without results after the loss of a peer. :meth:`DeviceCommunicator.check` then raises
the reason; call :meth:`DeviceCommunicator.check` before any result leaves the process.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from r2serve import _core, tensors
from r2serve.collectives import Collectives
from r2serve.communicator import Communicator, StepScope, check_step
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


os.register_at_fork(after_in_child=_OPEN.clear)  # the communicators of the parent


def steps_ended() -> dict[DeviceCommunicator, int]:
    """Returns :attr:`DeviceCommunicator.steps_ended` of every open communicator."""
    return {communicator: communicator.steps_ended for communicator in tuple(_OPEN)}


def check_all(steps: Mapping[DeviceCommunicator, int] | None = None) -> None:
    """Calls :meth:`DeviceCommunicator.check` of every open communicator of this process.

    Args:
        steps: result of :func:`steps_ended`, if later steps need not be compared yet.
    """
    for communicator in tuple(_OPEN):
        communicator.check(None if steps is None else steps.get(communicator, 0))


def wake_all() -> None:
    """Calls :meth:`DeviceCommunicator.wake` of every open communicator of this process."""
    for communicator in tuple(_OPEN):
        communicator.wake()


class DeviceCommunicator(Collectives):
    """A group of ranks with tensors on GPUs; every rank makes the communicator in the same way.

    Methods are those of :class:`r2serve.Communicator`, for contiguous tensors on ``device``. The
    caller orders calls on different streams (``Stream.wait_stream``). A captured graph may be
    replayed without limit, but not concurrently with other calls.
    """

    def __init__(self, host: Communicator, device: torch.device) -> None:
        """Collective over the ranks of ``host``; :meth:`close` closes ``host``, too.

        Args:
            device: GPU of this process with the tensors of all calls.

        Raises:
            ConfigError: ranks have different ``gpu_staging_bytes``, ``gpu_direct`` or
                ``gpu_direct_min_bytes``.
            InvalidArgumentError: device or build of r2serve is unsuitable, or ``gpu_direct`` is on
                and not possible.
            InternalError: the CUDA driver returned an error; the text contains the driver's text.
        """
        device = torch.empty(0, device=device).device  # adds the index
        # Bound before the first exchange: no rank waits in them for a rank that gave up on `host`.
        twin = host.twin(f"{host.name}/device")
        nodes, inter_node = _inter_node_group(host)
        self._parts = [twin] if inter_node is None else [twin, inter_node]
        for part in self._parts:
            host.bind(part)
        index = 0 if device.index is None else device.index
        try:
            _agree(host)
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
                f"no exchange inside the node, so every rank sends over rails: {why_not}"
                if why_not
                else f"{len(nodes[0])} ranks of each node exchange data before and after the rails",
            )
        why_not = self._stream_core.direct()
        _LOG.info(
            "communicator %s: %s",
            host.name,
            f"staging in pinned host memory: {why_not}"
            if why_not
            else f"staging in GPU memory (GPUDirect) from {host.config.gpu_direct_min_bytes} "
            "bytes on",
        )
        self._stream = _current_stream(device)
        core: Any = _InStream(self._stream_core, self._stream)
        super().__init__(core, host.rank, host.world_size, device)
        self.host = host
        self.name = host.name
        self.nodes = host.nodes
        self.algorithm = host.algorithm
        host.barrier()  # kernels of a rank could block the set-up of another rank on the same GPU
        self._close = weakref.finalize(self, _close, self._stream_core, [*self._parts, host])
        _OPEN.add(self)

    def compare_captures(self) -> None:
        """Makes a rank that replays another captured graph than the others an error.

        All ranks call, before the first capture, and must replay the same graphs in the same order.
        Without effect if ``R2CCL_CONSENSUS`` is off.
        """
        self._stream_core.compare_captures()

    def step(self, number: int, about: str = "") -> StepScope:
        """Ends the open step and begins a step, in the order of the current stream.

        Like ``Communicator.step``, but the host waits for nothing: ranks compare their calls,
        replayed graphs included, when their streams reach the end of the step, and :meth:`check`
        raises the error. A stream that is being captured is refused.
        """
        check_step(number)
        self.host.mark_step(number, about)  # for all_to_allv
        self._stream_core.begin_step(self._stream(), number, about, True)
        return StepScope(self)

    def mark_step(self, number: int, about: str = "") -> None:
        """Begins a step without a comparison at its end; see ``Communicator.mark_step``."""
        check_step(number)
        self.host.mark_step(number, about)
        self._stream_core.begin_step(self._stream(), number, about, False)

    def post_position(self) -> None:
        """Same as :meth:`end_step`, which waits for no rank."""
        self.end_step()

    def end_step(self) -> None:
        """Ends the open step; see :meth:`step`. Without an open step nothing happens."""
        self._stream_core.end_step(self._stream())

    @property
    def steps_ended(self) -> int:
        """Number of steps whose end is in the stream; an argument of :meth:`check`."""
        return self._stream_core.steps_ended()

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
        """Makes a communicator of the ranks of a torch group; see ``Communicator.from_group``."""
        host = Communicator.from_group(
            group, name=name, config=config, management_address=management_address
        )
        try:
            return cls(host, device)
        except BaseException:
            host.close()
            raise

    def all_to_all(
        self, tensor: Array, *, out: Array | None = None, name: str | None = None
    ) -> Array:
        """Runs ``Communicator.all_to_all`` on the current stream; ``name`` is not compared."""
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
        name: str | None = None,
    ) -> Array:
        """Runs ``Communicator.all_to_allv`` through host memory; a graph cannot capture the call.

        On the stream all ranks would have to agree on the number of slices, but no rank knows how
        much other ranks exchange.
        """
        source, _ = tensors.checked("tensor", tensor, self.device)
        tensors.check_sizes("out_sizes", out_sizes, self.world_size)
        shape = (sum(out_sizes), *source.shape[1:])
        target = tensors.target(out, shape, source)
        received = self.host.all_to_allv(source.cpu(), in_sizes, out_sizes, name=name)
        target.view(shape).copy_(tensors.as_tensor(received))
        return tensors.like(tensor, target, out)

    @functools.cached_property
    def fused(self) -> FusedReduce:
        """Collectives that end in a kernel of :mod:`r2serve.kernels`.

        Raises:
            ImportError: Triton is not installed.
        """
        from r2serve.fused import FusedReduce

        return FusedReduce(self._stream_core, self._stream, self.nodes, self.device)

    @property
    def spans_nodes(self) -> bool:
        """Whether ranks are on several nodes, so that rails carry traffic and can fail over."""
        return self.host.spans_nodes

    def check(self, steps: int | None = None) -> None:
        """Raises an error if the communicator has failed, so that later results are void.

        Waits until ended steps were compared. Call after a synchronisation with the stream.

        Args:
            steps: value of :attr:`steps_ended` after the last step with results in use. Default:
                all steps ended so far.

        Raises:
            PeerLostError, PeerClosedError, AbortedError, OrderMismatchError: sticky, so every
                later call raises the same error.
        """
        self._stream_core.check(self.steps_ended if steps is None else steps)

    def wake(self) -> None:
        """Announces a replay of a graph, so that the host thread polls without a pause.

        The host thread cannot see a replay by itself.
        """
        self._stream_core.wake()

    def abort(self, reason: str) -> None:
        """Ends all calls with an error, on this rank and on all others. Thread-safe."""
        self.host.abort(reason)

    def close(self) -> None:
        """Waits for work in the streams, then closes. Idempotent."""
        _OPEN.discard(self)
        self._close()

    def __enter__(self) -> DeviceCommunicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rails(self) -> list[RailInfo]:
        """Returns the rails of this process, over all links."""
        return self.host.rails()

    def events(self) -> list[journal.Event]:
        """Returns this process's journal, oldest event first."""
        return self.host.events()

    def inject(
        self, rail_index: int, fault: str, peer: int | None = None, *, bytes_per_s: float = 0.0
    ) -> None:
        """Injects a fault into a rail of this process; see ``Communicator.inject``."""
        self.host.inject(rail_index, fault, peer, bytes_per_s=bytes_per_s)


class _InStream:
    """Adapts the core's stream collectives to the signatures of the host collectives."""

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
    """Returns a function that returns the handle of torch's current stream.

    For tensors in host memory the function returns 0, the driver's default stream.
    """
    if device.type == "cpu":
        return lambda: 0
    return lambda: torch.cuda.current_stream(device).cuda_stream


def _agree(host: Communicator) -> None:
    """Raises ConfigError on all ranks if options differ, because such ranks would deadlock."""
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
            f"{name} (R2CCL_{name.upper()}) is {getattr(host.config, name)} here and {said} on "
            "ranks 0, 1, …: must be the same on all ranks"
        )


def _inter_node_group(host: Communicator) -> tuple[list[list[int]], Communicator | None]:
    """Returns the ranks of each node by local rank, and a communicator of the inter-node group.

    The communicator is None for a single node, for one rank a node, or if nodes differ in size.
    """
    members: dict[object, list[int]] = {}
    for rank, node in enumerate(host.nodes):
        members.setdefault(node, []).append(rank)
    nodes = list(members.values())
    if len(nodes) == 1 or len(nodes[0]) == 1 or len({len(each) for each in nodes}) > 1:
        return nodes, None
    local_rank = members[host.nodes[host.rank]].index(host.rank)
    return nodes, host.part(
        [each[local_rank] for each in nodes], f"{host.name}/local_rank{local_rank}"
    )


def _close(core: _core.StreamCommunicator, communicators: Sequence[Communicator]) -> None:
    core.close()
    for communicator in communicators:
        communicator.close()
