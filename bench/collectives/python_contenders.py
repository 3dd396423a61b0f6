"""Contenders called from Python: each op becomes a function without arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from r2serve.bench.collectives.matrix import WITH_ALGORITHMS
from r2serve.bench.collectives.mptcp import Mptcp
from r2serve.bench.collectives.operations import ROOT, sent, shares

Once = Callable[[], object]


class PythonContender(Protocol):
    def bind(self, op: str, algorithm: str, data: torch.Tensor, output: torch.Tensor) -> Once:
        """Returns the op as a function without arguments, in place if the op allows it.

        Raises ValueError for an op or algorithm missing in the contender.
        """

    def rails(self) -> list[str]:
        """Returns name, state and bytes sent of each rail; empty for a contender without rails."""

    def fault(self, rail: int, kind: str, bytes_per_s: float) -> None:
        """Injects a fault into a rail of this rank, like r2serve.Communicator.inject.

        Raises ValueError for a contender without fault injection.
        """

    def close(self) -> None: ...


class R2ccl:
    def __init__(self, rank: int, ranks: int, store: str) -> None:
        from r2serve.communicator import Communicator

        host, _, port = store.rpartition(":")
        self._communicator = Communicator.standalone(host, int(port), rank, ranks, name="bench")

    def bind(self, op: str, algorithm: str, data: torch.Tensor, output: torch.Tensor) -> Once:
        if algorithm != "auto" and op not in WITH_ALGORITHMS:
            raise ValueError(f"{op} has only one algorithm: auto")
        one = self._communicator
        if op == "all_reduce":
            chosen = None if algorithm == "auto" else algorithm
            return lambda: one.all_reduce(data, out=data, algorithm=chosen)
        gathered = shares(output.numel(), one.world_size)
        scattered = shares(data.numel(), one.world_size)
        even = sent(data.numel(), one.world_size, one.rank)
        received = output if one.rank == ROOT else None
        calls: dict[str, Once] = {
            "all_gather": lambda: one.all_gather(data, out=output),
            "all_gatherv": lambda: one.all_gatherv(data, gathered, out=output),
            "reduce_scatter": lambda: one.reduce_scatter(data, out=output),
            "reduce_scatterv": lambda: one.reduce_scatterv(data, scattered, out=output),
            "broadcast": lambda: one.broadcast(data, ROOT),
            "gather": lambda: one.gather(data, ROOT, out=received),
            "all_to_all": lambda: one.all_to_all(data, out=output),
            "all_to_allv": lambda: one.all_to_allv(data, even, even, out=output),
            "send_recv": ring(one.rank, one.world_size, one.send, one.recv, data, output),
            "barrier": one.barrier,
        }
        return _chosen("r2ccl", calls, op)

    def rails(self) -> list[str]:
        rails = [r for r in self._communicator.rails() if r.kind == "tcp"]
        return [f"{r.name},{r.state},{r.data_tx_bytes}" for r in rails]

    def fault(self, rail: int, kind: str, bytes_per_s: float) -> None:
        self._communicator.inject(rail, kind, bytes_per_s=bytes_per_s)

    def close(self) -> None:
        self._communicator.close()


class Gloo:
    """The gloo backend of torch.distributed; gather and scatter need even shards."""

    def __init__(self, rank: int, ranks: int, store: str) -> None:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks
        )
        self._rank = rank
        self._ranks = ranks

    def bind(self, op: str, algorithm: str, data: torch.Tensor, output: torch.Tensor) -> Once:
        dist = torch.distributed
        parts = list(output.chunk(self._ranks)) if self._rank == ROOT and op == "gather" else None
        even = sent(data.numel(), self._ranks, self._rank)
        calls: dict[str, Once] = {
            "all_reduce": lambda: dist.all_reduce(data),
            "all_gather": lambda: dist.all_gather_into_tensor(output, data),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(output, data),
            "broadcast": lambda: dist.broadcast(data, ROOT),
            "gather": lambda: dist.gather(data, parts, dst=ROOT),
            "all_to_all": lambda: dist.all_to_all_single(output, data),
            "all_to_allv": lambda: dist.all_to_all_single(output, data, even, even),
            "send_recv": ring(self._rank, self._ranks, dist.send, dist.recv, data, output),
            "barrier": dist.barrier,
        }
        return _chosen("gloo", calls, op)

    def rails(self) -> list[str]:
        return []

    def fault(self, rail: int, kind: str, bytes_per_s: float) -> None:
        raise ValueError("gloo has no rails")

    def close(self) -> None:
        torch.distributed.destroy_process_group()


def ring(
    rank: int,
    ranks: int,
    send: Callable[[torch.Tensor, int], object],
    receive: Callable[[torch.Tensor, int], object],
    data: torch.Tensor,
    output: torch.Tensor,
) -> Once:
    """Returns a function that passes a message of rank 0 from rank to rank, back to rank 0."""
    following, previous = (rank + 1) % ranks, (rank - 1) % ranks

    def start() -> None:
        send(data, following)
        receive(output, previous)

    def hand_on() -> None:
        receive(output, previous)
        send(output, following)

    return start if rank == ROOT else hand_on


def _chosen(contender: str, calls: dict[str, Once], op: str) -> Once:
    if op not in calls:
        raise ValueError(f"{contender} has no {op}")
    return calls[op]


CONTENDERS: dict[str, Callable[[int, int, str], PythonContender]] = {
    "r2ccl": R2ccl,
    "gloo": Gloo,
    "mptcp": Mptcp,
}
