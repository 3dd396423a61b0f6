"""Collectives of a group that spans nodes: vLLM's interface on a ``r2serve.Communicator``.

vLLM joins gathered tensors along any dimension; r2ccl returns ``(ranks, *shape)``. This module only
translates between both. ``dst`` and ``src`` are ranks in the group.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, Self, TypeVar

import torch
from vllm.distributed import parallel_state
from vllm.ir.ops import fused_add_rms_norm

from r2serve import Communicator, tensors
from r2serve.engines import flag, nodes, sidecar
from r2serve.engines.vllm import descriptions
from r2serve.engines.vllm.ending import end_worker_soon
from r2serve.engines.vllm.management_address import management_address
from r2serve.errors import InvalidArgumentError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_LOG = logging.getLogger(__name__)
_warned_of_no_rail = False
_P = ParamSpec("_P")
_R = TypeVar("_R")


def final(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorates a collective: an exception ends the worker, because peers wait for this rank."""

    @functools.wraps(method)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            end_worker_soon(error)
            raise

    return guarded


class ChosenByNodes:
    """Mixin of vLLM's own communicator; makes a ``spanning`` object for groups across nodes."""

    spanning: ClassVar[type[Any]]

    def __new__(cls, cpu_group: ProcessGroup, *args: Any, **kwargs: Any) -> Self:
        flag.keep_journals()
        config = flag.group_config()
        flag.log_with(logging.getLogger("vllm"), config.log_level)
        chosen: type[Any] = cls
        if nodes.spans_nodes(cpu_group, config):
            chosen = cls.spanning
        else:
            say_once_that_there_is_no_rail(kwargs.get("unique_name", ""))
        made: Self = super().__new__(chosen)
        return made


class SpanningCollectives:
    """Mixin of a device communicator of vLLM; uses the group attributes of vLLM's class."""

    cpu_group: Any
    device: torch.device
    unique_name: str
    world_size: int
    rank_in_group: int
    use_all2all: bool
    all2all_manager: Any
    r2ccl: Any  # a Communicator or DeviceCommunicator; Any, because results are torch tensors here

    def connect(self, unique_name: str) -> None:
        """Opens rails to the other ranks; collective over the group.

        Raises:
            R2cclError: a peer did not appear within ``connect_timeout_s``.
        """
        self.r2ccl = self.open(unique_name)
        _LOG.info(
            "group %s: %d ranks on %d nodes, carried by r2ccl over %s; algorithm: %s; sidecar: %s",
            unique_name,
            self.world_size,
            len(set(self.r2ccl.nodes)),
            ", ".join(sorted({rail.name for rail in self.r2ccl.rails()})),
            self.r2ccl.algorithm,
            sidecar.url() or "none started here",
        )
        if self.use_all2all:
            from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager

            self.all2all_manager = AgRsAll2AllManager(self.cpu_group)

    def open(self, unique_name: str) -> Any:
        """Makes the communicator of the group."""
        return Communicator.from_group(
            self.cpu_group,
            name=unique_name,
            config=flag.group_config(),
            management_address=management_address(),
        )

    def destroy(self) -> None:
        """Closes gracefully: delivers sent data first, within a bound."""
        self.r2ccl.close()
        super().destroy()  # type: ignore[misc]

    def suspend(self) -> None:
        """Keeps every buffer while the engine sleeps (``--enable-nccl-comm-suspend``).

        Captured graphs contain the addresses, and peers write into the buffers.
        """
        _LOG.info(
            "group %s: suspend frees no memory of r2ccl; rails and pinned memory stay",
            self.unique_name,
        )

    def resume(self) -> None:
        """Does nothing, because :meth:`suspend` has kept everything."""

    def checkpoint_prepare(self) -> None:
        """Refuses, because a restored process would have no connection to its peers.

        Raises:
            InvalidArgumentError: always; the group stays usable.
        """
        raise InvalidArgumentError(
            f"checkpoint_prepare: group {self.unique_name} spans nodes by r2ccl, and a checkpoint "
            "of a process contains no connections; an engine for checkpoints must run with "
            "--distributed-backend default"
        )

    def checkpoint_restore(self) -> None:
        """Does nothing, because :meth:`checkpoint_prepare` refuses every checkpoint."""

    @final
    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Returns the sum over all ranks; ``input_`` is unchanged."""
        total: torch.Tensor = self.r2ccl.all_reduce(input_.contiguous())
        return total

    @final
    def all_reduce_add_rms_norm(
        self, input_: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs all_reduce and vLLM's ``fused_add_rms_norm``; returns (normed, new residual)."""
        made: tuple[torch.Tensor, torch.Tensor] = fused_add_rms_norm(
            self.r2ccl.all_reduce(input_.contiguous()), residual, weight, epsilon
        )
        return made

    def fuses(self, shape: tuple[int, int], dtype: torch.dtype) -> bool:
        """Whether :meth:`all_reduce_add_rms_norm` fuses tensors of this shape."""
        return True

    @final
    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Gathers all ranks' tensors, joined along ``dim``."""
        dim = _positive(dim, input_)
        return _joined(
            tensors.restored(self.r2ccl.all_gather(tensors.carried(input_)), input_), dim
        )

    @final
    def all_gatherv(
        self,
        input_: torch.Tensor | list[torch.Tensor],
        dim: int = 0,
        sizes: list[int] | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        """Gathers along dimension 0, with ``sizes[r]`` rows of rank r."""
        if dim != 0:
            raise NotImplementedError("all_gatherv joins along dimension 0 only")
        if isinstance(input_, torch.Tensor):
            return self._all_gatherv(input_, sizes)
        return [self._all_gatherv(tensor, sizes) for tensor in input_]

    @final
    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Reduces over all ranks; returns this rank's shard along ``dim``."""
        dim = _positive(dim, input_)
        mine: torch.Tensor = self.r2ccl.reduce_scatter(_in_front(input_, dim))
        return mine.movedim(0, dim).contiguous()

    @final
    def reduce_scatterv(
        self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        """Reduces over all ranks; rank r receives ``sizes[r]`` rows along ``dim``."""
        dim = _positive(dim, input_)
        rows = _in_front(input_, dim)
        mine: torch.Tensor
        if sizes is None:
            mine = self.r2ccl.reduce_scatter(rows)
        else:
            mine = self.r2ccl.reduce_scatterv(rows, sizes)
        return mine.movedim(0, dim).contiguous()

    def reduce_scatterv_into_output(
        self,
        input_: torch.Tensor,
        output: torch.Tensor,
        dim: int = -1,
        sizes: list[int] | None = None,
    ) -> torch.Tensor:
        """Runs reduce_scatterv, with the result in ``output``."""
        return output.copy_(self.reduce_scatterv(input_, dim, sizes))

    @final
    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """Gathers all ranks' tensors, joined along ``dim``, on rank ``dst``; None elsewhere."""
        dim = _positive(dim, input_)
        gathered = self.r2ccl.gather(tensors.carried(input_), dst)
        return None if gathered is None else _joined(tensors.restored(gathered, input_), dim)

    @final
    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Copies rank ``src``'s values to all ranks, in place."""
        carried = tensors.carried(tensor)
        self.r2ccl.broadcast(carried, src)
        if carried.data_ptr() != tensor.data_ptr():
            tensor.copy_(carried.view(tensor.dtype).view(tensor.shape))
        return tensor

    @final
    def send(self, tensor: torch.Tensor, dst: int | None = None) -> None:
        """Sends to rank ``dst``, by default the next rank."""
        if dst is None:
            dst = (self.rank_in_group + 1) % self.world_size
        self.r2ccl.send(tensors.carried(tensor), dst)

    @final
    def recv(self, size: torch.Size, dtype: torch.dtype, src: int | None = None) -> torch.Tensor:
        """Receives from rank ``src``, by default the previous rank.

        ``size`` and ``dtype`` must equal shape and dtype of the sent tensor.
        """
        if src is None:
            src = (self.rank_in_group - 1) % self.world_size
        tensor = torch.empty(size, dtype=dtype, device=self.device)
        self.r2ccl.recv(tensors.carried(tensor), src)
        return tensor

    @final
    def send_tensor_dict(self, tensor_dict: dict[str, torch.Tensor | Any], dst: int) -> None:
        """Sends to rank ``dst``: the length of the description, the description, the tensors.

        Raises:
            InvalidArgumentError: see :func:`r2serve.engines.vllm.descriptions.encode`.
        """
        text = torch.frombuffer(bytearray(descriptions.encode(tensor_dict)), dtype=torch.uint8)
        text = text.to(self.device)
        self.r2ccl.send(torch.tensor([text.numel()], device=self.device), dst)
        self.r2ccl.send(text, dst)
        for value in tensor_dict.values():
            if isinstance(value, torch.Tensor) and value.numel():
                self.r2ccl.send(tensors.carried(value), dst)

    @final
    def recv_tensor_dict(self, src: int) -> dict[str, torch.Tensor | Any]:
        """Receives a dict sent by rank ``src`` with send_tensor_dict."""
        length = torch.empty(1, dtype=torch.int64, device=self.device)
        self.r2ccl.recv(length, src)
        text = torch.empty(
            descriptions.checked_length(int(length.item())), dtype=torch.uint8, device=self.device
        )
        self.r2ccl.recv(text, src)
        received: dict[str, Any] = {}
        for key, value in descriptions.decode(text.cpu().numpy().tobytes()).items():
            if isinstance(value, descriptions.Described):
                value = torch.empty(value.shape, dtype=value.dtype, device=self.device)
                if value.numel():
                    self.r2ccl.recv(tensors.carried(value), src)
            received[key] = value
        return received

    def _all_gatherv(self, input_: torch.Tensor, sizes: list[int] | None) -> torch.Tensor:
        if sizes is None:
            return tensors.restored(self.r2ccl.all_gather(tensors.carried(input_)), input_).flatten(
                0, 1
            )
        row = input_.shape[1:]
        rows = input_.reshape(input_.shape[0], math.prod(row)).contiguous()
        if rows.dtype not in tensors.DTYPES:
            rows = rows.view(torch.uint8)
        joined: torch.Tensor = self.r2ccl.all_gatherv(rows, sizes)
        return joined.view(input_.dtype).view(sum(sizes), *row)


def say_once_that_there_is_no_rail(group: str) -> None:
    """Logs the first group inside a single node, and no later group."""
    global _warned_of_no_rail
    if not _warned_of_no_rail:
        _warned_of_no_rail = True
        _LOG.info(
            "group %s is inside one node: the engine's own path carries the group, with no rail to "
            "fail over to",
            group,
        )


def refuse_checkpoint() -> None:
    """Refuses a checkpoint of this process before any group has prepared for the checkpoint.

    Raises:
        InvalidArgumentError: a group spans nodes.
    """
    for reference in list(parallel_state._groups.values()):
        group = reference()
        communicator = None if group is None else group.device_communicator
        if isinstance(communicator, SpanningCollectives):
            communicator.checkpoint_prepare()


def _positive(dim: int, tensor: torch.Tensor) -> int:
    assert -tensor.dim() <= dim < tensor.dim(), f"dim {dim} of a tensor of {tensor.dim()}"
    return dim % tensor.dim()


def _in_front(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return tensor.movedim(dim, 0).contiguous()


def _joined(ranks: torch.Tensor, dim: int) -> torch.Tensor:
    """(ranks, *shape) -> the tensors of the ranks, joined along ``dim``."""
    return ranks.movedim(0, dim).flatten(dim, dim + 1)
