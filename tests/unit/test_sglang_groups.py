"""Groups of SGLang: the backend of each group, and collectives on communicators of two ranks."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ports import free_port
from torch.distributed import ReduceOp

from r2serve import Communicator
from r2serve.config import Config
from r2serve.engines import flag
from r2serve.engines.sglang import groups, spanning
from r2serve.engines.torch import group as torch_groups
from r2serve.errors import InvalidArgumentError


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(flag.VARIABLE, "r2ccl")
    monkeypatch.setenv(flag.SPANS_VARIABLE, "1")


# ---- which backend ----


def asked(backend: str, ranks: list[int] | None = None) -> str:
    """Returns the backend in SGLang's call of ``new_group``."""

    def new_group(ranks: Any, timeout: Any, backend: str, **_: Any) -> str:
        return backend

    made: str = groups.new_group(new_group, ranks, backend=backend, group_desc="tp:cpu")
    return made


def test_groups_that_span_nodes_use_r2ccl_and_others_stay(
    spans: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "_nodes_of_world", lambda: [0, 0, 1, 1])
    monkeypatch.setattr(groups, "_stock", "nccl")
    assert asked("gloo") == asked("gloo", [0, 2]) == asked("r2ccl", [1, 3]) == "r2ccl"
    assert asked("gloo", [0, 1]) == asked("gloo", [3]) == "gloo"
    assert asked("r2ccl", [2, 3]) == "nccl"
    assert asked("cpu:gloo,cuda:nccl") == "cpu:gloo,cuda:nccl"


def test_without_the_choice_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(flag.VARIABLE, "r2ccl")
    monkeypatch.setenv(flag.SPANS_VARIABLE, "0")
    assert asked("gloo") == "gloo"
    assert groups.default_backend(lambda device: f"stock of {device}", "cpu") == "stock of cpu"


def test_the_backend_of_world_is_r2ccl(spans: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "management_address", lambda: "127.0.0.1")
    monkeypatch.setattr(groups, "_stock", "none")
    monkeypatch.setattr(torch_groups, "_management_address", None)
    monkeypatch.setattr(torch_groups, "_config", None)
    ours = logging.getLogger("r2serve")
    monkeypatch.setattr(ours, "level", ours.level)
    monkeypatch.setenv("R2CCL_JOURNAL_DIR", "")
    monkeypatch.delenv("R2CCL_CONSENSUS", raising=False)
    assert groups.default_backend(lambda _: "nccl", "cuda") == "r2ccl"
    assert groups._stock == "nccl"
    assert torch_groups._management_address == "127.0.0.1"
    assert torch_groups._config == flag.group_config()
    assert "R2CCL_CONSENSUS" not in os.environ


def test_a_group_without_torch_is_not_carried(spans: None) -> None:
    assert not groups.carries(SimpleNamespace(rank=0, world_size=2))


# ---- collectives of two ranks ----


class Ranks:
    """Two communicators of this process; :meth:`run` calls a function on both at once."""

    def __init__(self) -> None:
        self._made: list[Communicator] = []
        port = free_port()
        config = Config(rails="127.0.0.1,127.0.0.2", node="per-rank", journal_dir="")

        def make(rank: int) -> Communicator:
            return Communicator.standalone(
                "127.0.0.1", port, rank, 2, config=config, share_engine=False
            )

        self._made = self._each(make)

    def run(self, call: Callable[[Communicator], Any]) -> list[Any]:
        return self._each(lambda rank: call(self._made[rank]))

    def _each(self, call: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None, None]
        failures: list[BaseException] = []

        def one(rank: int) -> None:
            try:
                results[rank] = call(rank)
            except Exception as error:  # noqa: BLE001  raised below, in the test's thread
                failures.append(error)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return results

    def close(self) -> None:
        self.run(lambda comm: comm.close())


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.close()


def coordinator(communicator: Communicator | None) -> Any:
    made = SimpleNamespace(world_size=2)
    setattr(made, groups.COMMUNICATOR, communicator)
    return made


def stock(*_: Any) -> Any:
    raise AssertionError("SGLang's own path was called")


def test_all_reduce_sums_in_place(ranks: Ranks) -> None:
    def call(comm: Communicator) -> list[list[float]]:
        given = torch.arange(6.0).view(2, 3) + comm.rank
        total = groups.all_reduce(stock, coordinator(comm), given)
        assert total is given
        turned = (torch.arange(6.0).view(2, 3) + comm.rank).t()
        groups.all_reduce(stock, coordinator(comm), turned)
        assert torch.equal(turned.t(), given)
        return given.tolist()

    assert ranks.run(call) == [[[1.0, 3.0, 5.0], [7.0, 9.0, 11.0]]] * 2


@pytest.mark.parametrize("dim", [-1, 0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_all_gather_joins_along_any_dimension(ranks: Ranks, dim: int, dtype: torch.dtype) -> None:
    parts = [(torch.arange(6.0).view(2, 3) + 10 * rank).to(dtype) for rank in (0, 1)]
    expected = torch.cat([part.float() for part in parts], dim)

    def call(comm: Communicator) -> bool:
        joined = groups.all_gather(stock, coordinator(comm), parts[comm.rank], dim)
        return joined.dtype == dtype and torch.equal(joined.float(), expected)

    assert ranks.run(call) == [True, True]


def test_a_group_inside_a_node_keeps_sglangs_path() -> None:
    calls: list[tuple[Any, ...]] = []
    inside = coordinator(None)
    tensor = torch.zeros(2)
    groups.all_reduce(lambda *given: calls.append(given), inside, tensor)  # type: ignore[arg-type,func-returns-value]
    groups.all_gather(lambda *given: calls.append(given), inside, tensor, 0, [tensor])
    assert calls == [(inside, tensor), (inside, tensor, 0, [tensor])]


# ---- the methods of PyNcclCommunicator ----


class OnCpus(spanning.SpanningPyNccl):
    """The methods on communicators of CPUs, which have the same interface."""

    def __init__(self, comm: Communicator) -> None:
        self.r2ccl, self.rank, self.world_size = comm, comm.rank, comm.world_size


def test_every_method_of_pynccl_moves_the_right_data(ranks: Ranks) -> None:
    def call(comm: Communicator) -> dict[str, Any]:
        made = OnCpus(comm)
        rank = comm.rank
        found: dict[str, Any] = {}
        with made.change_state(enable=False):
            assert made.available
            assert not made.disabled
            tensor = torch.tensor([1.0, 2.0]) + rank
            made.all_reduce(tensor)
            found["all_reduce"] = tensor.tolist()
        found["max"] = made.outplace_all_reduce(
            torch.tensor([1.0, -rank]), op=ReduceOp.MAX
        ).tolist()
        gathered = torch.empty(2, 2)
        made.group_start()
        made.all_gather(gathered, torch.full((1, 2), rank + 1.0))
        made.group_end()
        found["all_gather"] = gathered.tolist()
        rows = torch.empty(3, 1)
        made.all_gather(rows, torch.full((1 + rank, 1), rank + 1.0), sizes=[1, 2])
        found["all_gatherv"] = rows.flatten().tolist()
        own = torch.empty(1)
        made.reduce_scatter(own, torch.tensor([1.0, 5.0]))
        found["reduce_scatter"] = own.tolist()
        shares = torch.empty(1 + rank)
        made.reduce_scatter(shares, torch.tensor([1.0, 2.0, 3.0]), sizes=[1, 2])
        found["reduce_scatterv"] = shares.tolist()
        swapped = torch.empty(4)
        made.all_to_all_single(swapped, torch.arange(4.0) + 10 * rank)
        found["all_to_all"] = swapped.tolist()
        said = torch.tensor([float(rank)])
        made.broadcast(said, 1)
        found["broadcast"] = said.tolist()
        if rank == 0:
            made.send(torch.tensor([7]), 1)
        else:
            received = torch.zeros(1, dtype=torch.int64)
            made.recv(received, 0)
            found["recv"] = received.tolist()
        return found

    first, second = ranks.run(call)
    alike = {
        "all_reduce": [3.0, 5.0],
        "max": [1.0, 0.0],
        "all_gather": [[1.0, 1.0], [2.0, 2.0]],
        "all_gatherv": [1.0, 2.0, 2.0],
        "broadcast": [1.0],
    }
    assert first == {
        **alike,
        "reduce_scatter": [2.0],
        "reduce_scatterv": [2.0],
        "all_to_all": [0.0, 1.0, 10.0, 11.0],
    }
    assert second == {
        **alike,
        "reduce_scatter": [10.0],
        "reduce_scatterv": [4.0, 6.0],
        "all_to_all": [2.0, 3.0, 12.0, 13.0],
        "recv": [7],
    }


def test_wrong_arguments_of_pynccl_are_named() -> None:
    made = OnCpus(SimpleNamespace(rank=0, world_size=2, all_reduce=None))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"op is .*: must be one of SUM, PRODUCT"):
        made.all_reduce(torch.zeros(2), ReduceOp.BAND)
    turned = torch.empty(2, 3).t()
    with pytest.raises(InvalidArgumentError, match=r"output of shape \(3, 2\) .*contiguous"):
        made.all_gather(turned, torch.zeros(3))
    with pytest.raises(InvalidArgumentError, match="--enable-symm-mem must be left out"):
        made.register_comm_window_raw(0, 8)
