"""Wrong input is refused before anything is sent; the error names the field and the value."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from ports import free_port

from r2serve import tensors
from r2serve.communicator import Communicator
from r2serve.config import Config
from r2serve.errors import AbortedError, ConfigError, InvalidArgumentError

CONFIG = Config(rails="127.0.0.1", node="per-rank")


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Communicator]]:
    """Two ranks in this process; most tests use only rank 1."""
    made: list[Communicator | None] = [None, None]
    port = free_port()

    def make(rank: int) -> None:
        made[rank] = Communicator.standalone(
            "127.0.0.1", port, rank, 2, config=CONFIG, share_engine=False
        )

    threads = [threading.Thread(target=make, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ranks = [one for one in made if one is not None]
    assert len(ranks) == 2
    yield ranks
    closers = [threading.Thread(target=one.close) for one in ranks]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join()


ONES = torch.ones(4, 3)
NINE = torch.ones(9)
Call = Callable[[Communicator], object]

WRONG: dict[str, tuple[Call, str]] = {
    "dtype": (
        lambda c: c.all_reduce(torch.ones(3, dtype=torch.complex64)),
        "tensor: dtype torch.complex64 is none of float16, bfloat16, float32",
    ),
    "dtype of numpy": (lambda c: c.all_reduce(np.ones(3, np.complex64)), "tensor: dtype .*complex"),
    "kind of numpy": (lambda c: c.broadcast(np.array(["a"]), 0), "tensor: .*str"),
    "strides": (
        lambda c: c.all_reduce(ONES.t()),
        r"tensor: shape \(3, 4\), strides \(1, 3\) is not contiguous",
    ),
    "strides of another": (lambda c: c.all_gather(ONES.t()), "tensor: .* is not contiguous"),
    "device": (
        lambda c: c.all_reduce(torch.empty(3, device="meta")),
        "tensor: is on meta; this communicator takes tensors on cpu",
    ),
    "op": (lambda c: c.all_reduce(ONES, "mean"), "op: 'mean' is none of sum, prod, min, max, avg"),
    "op of reduce_scatter": (lambda c: c.reduce_scatter(ONES, "xor"), "op: 'xor' is none of sum"),
    "op of bool": (
        lambda c: c.all_reduce(torch.ones(3, dtype=torch.bool), "avg"),
        "op: avg is not defined for bool",
    ),
    "op of bool, scattered": (
        lambda c: c.reduce_scatter(torch.ones(4, dtype=torch.bool), "avg"),
        "op: avg is not defined for bool",
    ),
    "algorithm": (
        lambda c: c.all_reduce(ONES, algorithm="ring"),
        "algorithm: 'ring' is none of auto, one_shot, two_shot",
    ),
    "shape of out": (
        lambda c: c.all_reduce(ONES, out=torch.empty(5)),
        r"out: \(5,\) of torch.float32 where \(4, 3\) of torch.float32 is needed",
    ),
    "dtype of out": (
        lambda c: c.all_reduce(ONES, out=torch.empty(4, 3, dtype=torch.float64)),
        r"out: \(4, 3\) of torch.float64 where",
    ),
    "strides of out": (
        lambda c: c.all_reduce(torch.ones(3, 4), out=torch.empty(4, 3).t()),
        "out: .* is not contiguous",
    ),
    "overlap": (lambda c: c.all_reduce(NINE[:8], out=NINE[1:]), "out: overlaps the input"),
    "another rank's part": (lambda c: c.all_gather(NINE[:4], out=NINE[:8]), "out: overlaps"),
    "rows of reduce_scatter": (
        lambda c: c.reduce_scatter(torch.ones(3, 2)),
        r"tensor: dimension 0 of shape \(3, 2\) is not divisible by the world size 2",
    ),
    "a scalar to scatter": (lambda c: c.reduce_scatter(torch.tensor(1.0)), r"tensor: .*shape \(\)"),
    "rows of all_to_all": (
        lambda c: c.all_to_all(torch.ones(5)),
        r"tensor: dimension 0 of shape \(5,\) is not divisible by the world size 2",
    ),
    "number of sizes": (
        lambda c: c.all_gatherv(ONES, [4]),
        r"sizes: \[4\] is not one size \(0 or more\) for each of 2 ranks",
    ),
    "negative size": (lambda c: c.all_gatherv(ONES, [-1, 4]), r"sizes: \[-1, 4\] is not one size"),
    "own size": (
        lambda c: c.all_gatherv(ONES, [4, 5]),
        r"tensor: shape \(4, 3\) where sizes \[4, 5\] ask for 5 rows",
    ),
    "sum of sizes": (
        lambda c: c.reduce_scatterv(ONES, [1, 2]),
        r"tensor: shape \(4, 3\) where sizes \[1, 2\] ask for 3 rows",
    ),
    "in_sizes": (
        lambda c: c.all_to_allv(ONES, [4, 1], [1, 1]),
        r"tensor: shape \(4, 3\) where .*\[4, 1\] ask for 5 rows",
    ),
    "out_sizes": (
        lambda c: c.all_to_allv(ONES, [3, 1], [1, 1, 1]),
        r"out_sizes: \[1, 1, 1\] is not one size",
    ),
    "root": (lambda c: c.broadcast(ONES, 2), "root: 2 is not a rank of 0 to 1"),
    "negative root": (lambda c: c.broadcast(ONES, -1), "root: -1 is not a rank of 0 to 1"),
    "root of gather": (lambda c: c.gather(ONES, 7), "root: 7 is not a rank of 0 to 1"),
    "destination": (lambda c: c.send(ONES, 2), "dst: 2 is not a rank of 0 to 1"),
    "destination itself": (lambda c: c.send(ONES, 1), "dst: is this rank itself"),
    "source": (lambda c: c.recv(ONES, 5), "src: 5 is not a rank of 0 to 1"),
    "source itself": (lambda c: c.recv(ONES, 1), "src: is this rank itself"),
    "rail": (lambda c: c.inject(3, "carrier_loss"), "rail 3: no peer has a rail of this index"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_named(pair: list[Communicator], case: str) -> None:
    call, words = WRONG[case]
    with pytest.raises(InvalidArgumentError, match=words):
        call(pair[1])


@pytest.mark.timeout(60)
def test_an_unknown_fault_is_named(pair: list[Communicator]) -> None:
    known = "carrier_loss, black_hole, reset, slow, corrupt, heal"
    with pytest.raises(ValueError, match=f"fault: 'melt' is none of {known}"):
        pair[1].inject(0, "melt")


@pytest.mark.timeout(60)
def test_a_deprecated_fault_is_noted_once(
    pair: list[Communicator], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("r2serve.communicator._NOTED", set())
    for fault in ("cut", "cut", "carrier_loss"):
        with pytest.raises(InvalidArgumentError, match="no peer has a rail of this index"):
            pair[1].inject(3, fault)
    logged = [record.getMessage() for record in caplog.records]
    noted = [line for line in logged if "deprecated" in line]
    assert noted == ["inject: `cut` is deprecated: use `carrier_loss`"]


@pytest.mark.timeout(60)
def test_nothing_was_sent_and_the_communicator_stays_usable(pair: list[Communicator]) -> None:
    for call, _ in WRONG.values():
        with pytest.raises(InvalidArgumentError):
            call(pair[1])
    sums: list[torch.Tensor] = []
    threads = [
        threading.Thread(target=lambda one=one: sums.append(one.all_reduce(torch.ones(3))))
        for one in pair
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [total.tolist() for total in sums] == [[2.0] * 3] * 2


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_the_own_rank_must_be_valid(rank: int, world_size: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"rank: {rank} is not within 0 to"):
        Communicator.standalone("127.0.0.1", free_port(), rank, world_size, config=CONFIG)


def test_an_address_of_another_machine_is_named() -> None:
    config = Config(rails="203.0.113.7", node="per-rank")
    with pytest.raises(ConfigError, match=re.escape("203.0.113.7")):
        Communicator.standalone("127.0.0.1", free_port(), 0, 1, config=config)


@pytest.mark.timeout(60)
def test_an_abort_reaches_ranks_that_wait_in_a_bound_communicator(
    pair: list[Communicator],
) -> None:
    hosts = [one.twin("host") for one in pair]
    parts = [one.twin("part") for one in hosts]
    for host, part in zip(hosts, parts, strict=True):
        host.bind(part)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(parts[0].barrier)
        hosts[1].abort("the test wants it")
        error = waiting.exception(60)
    assert isinstance(error, AbortedError)
    assert "rank 1 gave up: the test wants it" in str(error)
    for one in (*parts, *hosts):
        one.close()


@pytest.mark.timeout(60)
def test_a_lone_rank_needs_no_rail_and_a_closed_communicator_refuses_calls() -> None:
    alone = Communicator.standalone("127.0.0.1", free_port(), 0, 1, config=CONFIG)
    data = torch.arange(6.0)
    assert torch.equal(alone.all_reduce(data, "avg"), data)
    assert torch.equal(alone.all_gather(data)[0], data)
    assert torch.equal(alone.reduce_scatter(data), data)
    assert torch.equal(alone.all_to_all(data), data)
    assert torch.equal(alone.broadcast(data, 0), data)
    gathered = alone.gather(data, 0)
    assert gathered is not None
    assert torch.equal(gathered[0], data)
    alone.barrier()
    assert not alone.spans_nodes
    assert alone.rails() == []
    alone.close()
    alone.close()
    with pytest.raises(InvalidArgumentError, match="communicator 'default' has been closed"):
        alone.all_reduce(data)


@pytest.mark.timeout(60)
def test_numpy_in_is_numpy_out_and_torch_in_is_torch_out() -> None:
    with Communicator.standalone("127.0.0.1", free_port(), 0, 1, config=CONFIG) as alone:
        assert isinstance(alone.all_reduce(np.ones(3)), np.ndarray)
        assert isinstance(alone.all_gather(np.ones(3)), np.ndarray)
        assert isinstance(alone.all_reduce(torch.ones(3)), torch.Tensor)
        out = np.empty(3)
        assert alone.all_reduce(np.ones(3), out=out) is out
        assert out.tolist() == [1, 1, 1]


@pytest.mark.parametrize("shape", [(0,), (1,), (1, 1)])
def test_the_byte_form_ignores_the_stride_of_a_single_element(shape: tuple[int, ...]) -> None:
    """torch counts such a tensor as contiguous, with any stride."""
    tensor = torch.full((*shape, 2), 7, dtype=torch.uint16)[..., 0]
    assert tensor.is_contiguous()
    assert tensors.carried(tensor).tolist() == [7, 0] * tensor.numel()
