"""Groups of SGLang that span nodes, carried by r2ccl; groups inside a node stay SGLang's own.

WORLD, ``device_group`` and ``cpu_group`` use the torch backend ``r2ccl``: requests, pipeline stages
and the synchronisation of samples then survive the loss of any NIC, the management NIC included.
The large collectives of a ``GroupCoordinator`` on CPUs call a :class:`r2serve.Communicator`
directly, before SGLang's shared-memory path, which would not reach another node.

Every rank makes every group, so all ranks decide alike: by the nodes of WORLD's ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from r2serve import tensors
from r2serve.communicator import Communicator
from r2serve.engines import flag, sidecar
from r2serve.engines.sglang.management_address import management_address
from r2serve.errors import R2cclError

_LOG = logging.getLogger(__name__)

R2CCL = "r2ccl"
GLOO = "gloo"
COMMUNICATOR = "r2serve_communicator"
"""Attribute of a ``GroupCoordinator``: the communicator of its large collectives, or None."""

_stock = GLOO
"""SGLang's own backend of device groups in this process."""


def default_backend(original: Callable[[str], str], device: str) -> str:
    """Hook around ``get_default_distributed_backend``: the backend of WORLD and device groups."""
    global _stock
    stock = original(device)
    if not flag.spans_nodes():
        return stock
    from r2serve.engines.torch import BACKEND, use_config, use_management_address

    _stock = stock
    flag.keep_journals()
    config = flag.group_config()
    # SGLang configures the root logger, so only the level is r2serve's own.
    logging.getLogger("r2serve").setLevel(config.log_level.upper())
    use_config(config)
    use_management_address(management_address())
    return BACKEND


def new_group(
    original: Callable[..., Any],
    ranks: Sequence[int] | None = None,
    timeout: Any = None,
    backend: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Hook around ``torch.distributed.new_group``: r2ccl across nodes, SGLang's choice inside."""
    nodes = _nodes_of_world()
    if nodes is not None and backend in (GLOO, R2CCL):
        backend = _backend_of(range(len(nodes)) if ranks is None else ranks, nodes, backend)
    return original(ranks, timeout, backend, *args, **kwargs)


def _nodes_of_world() -> Sequence[int] | None:
    """Returns the node of each rank of WORLD; None: r2ccl does not carry WORLD."""
    if not flag.spans_nodes():
        return None
    from r2serve.engines.torch.group import open_groups

    # WORLD is the first group; every later group of all ranks has the same nodes.
    for group in open_groups():
        if group.communicator.world_size == dist.get_world_size():
            return group.communicator.nodes
    return None


def _backend_of(ranks: Sequence[int], nodes: Sequence[int], asked: str) -> str:
    if len({nodes[rank] for rank in ranks}) > 1:
        return R2CCL
    return _stock if asked == R2CCL else asked


def monitored_barrier(
    original: Callable[..., Any],
    group: Any = None,
    timeout: Any = None,
    wait_all_ranks: bool = False,
) -> Any:
    """Hook around ``torch.distributed.monitored_barrier``, which torch allows for gloo only.

    Raises:
        R2cclError: a rank did not come within ``timeout``, or was lost.
    """
    if not carries(group):
        return original(group, timeout, wait_all_ranks)
    options = SimpleNamespace(timeout=timeout or timedelta(0), asyncOp=False)
    try:
        group.barrier(options).wait()
    except R2cclError:
        _LOG.exception("a rank has not reached the barrier")  # SGLang shows another error instead
        raise


def carries(group: Any) -> bool:
    """Whether r2ccl carries a group. SGLang also has groups without torch."""
    if not flag.spans_nodes():
        return False
    from r2serve.engines.torch.group import R2cclGroup

    return isinstance(group, R2cclGroup)


def connect(_: Any, coordinator: Any, *args: Any, **kwargs: Any) -> None:
    """Hook after ``GroupCoordinator.__init__``: the communicator of a group that spans nodes."""
    setattr(coordinator, COMMUNICATOR, None)
    if not flag.spans_nodes() or coordinator.world_size == 1:
        return
    if not carries(coordinator.cpu_group):
        _LOG.info("group %s is inside one node: SGLang's own path", coordinator.unique_name)
        return
    carried: Communicator = coordinator.cpu_group.communicator
    if coordinator.device.type == "cpu":
        carried = carried.twin(f"{coordinator.unique_name}/cpu")
        setattr(coordinator, COMMUNICATOR, carried)
    _LOG.info(
        "group %s: %d ranks on %d nodes, carried by r2ccl over %s; algorithm: %s; sidecar: %s",
        coordinator.unique_name,
        coordinator.world_size,
        len(set(carried.nodes)),
        ", ".join(sorted({rail.name for rail in carried.rails()})),
        carried.algorithm,
        sidecar.url() or "none started here",
    )


def all_reduce(
    original: Callable[..., torch.Tensor], coordinator: Any, input_: torch.Tensor
) -> torch.Tensor:
    """Hook around ``GroupCoordinator.all_reduce``; the sum replaces ``input_``, as in SGLang."""
    communicator: Any = getattr(coordinator, COMMUNICATOR)
    if communicator is None or not input_.is_cpu or input_.dtype not in tensors.DTYPES:
        return original(coordinator, input_)
    if input_.is_contiguous():
        communicator.all_reduce(input_, out=input_)
    else:
        input_.copy_(communicator.all_reduce(input_.contiguous()))
    return input_


def all_gather(
    original: Callable[..., Any],
    coordinator: Any,
    input_: torch.Tensor,
    dim: int = -1,
    output_tensor_list: list[torch.Tensor] | None = None,
) -> Any:
    """Hook around ``GroupCoordinator.all_gather``; joins the tensors of all ranks along ``dim``."""
    communicator: Any = getattr(coordinator, COMMUNICATOR)
    if communicator is None or not input_.is_cpu or output_tensor_list is not None:
        return original(coordinator, input_, dim, output_tensor_list)
    assert -input_.dim() <= dim < input_.dim(), f"dim {dim} of a tensor of {input_.dim()}"
    dim %= input_.dim()
    gathered = tensors.restored(communicator.all_gather(tensors.carried(input_)), input_)
    return gathered.movedim(0, dim).flatten(dim, dim + 1)
