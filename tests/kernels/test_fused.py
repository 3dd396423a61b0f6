"""The fused reduce: a collective that ends in a Triton kernel, tested over rails."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from inputs import DEVICE
from ports import free_port

from r2serve import tensors
from r2serve.communicator import Communicator
from r2serve.config import Config
from r2serve.device import DeviceCommunicator
from r2serve.errors import InvalidArgumentError
from r2serve.fused import FusedReduce
from r2serve.kernels import reference

RANKS = 2
EPSILON = 1e-5


@pytest.fixture(scope="module")
def pair(cuda_driver: str) -> Iterator[list[DeviceCommunicator]]:
    port = free_port()

    def make(rank: int) -> DeviceCommunicator:
        config = Config(
            rails="127.0.0.1,127.0.0.2",
            node=f"n{rank}",
            cuda_library=cuda_driver,
            gpu_staging_bytes=1024**2,
        )
        host = Communicator.standalone(
            "127.0.0.1", port, rank, RANKS, name="tp", config=config, share_engine=False
        )
        return DeviceCommunicator(host, torch.device(DEVICE))

    with ThreadPoolExecutor(RANKS) as pool:
        made = list(pool.map(make, range(RANKS)))
        yield made
        list(pool.map(DeviceCommunicator.close, made))


def bring(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(rank))
    return made.to(dtype).to(DEVICE)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device=DEVICE)


def fused_at(
    pair: list[DeviceCommunicator], me: int, sources: list[torch.Tensor], *others: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the result of the fused call on rank ``me``.

    The other rank only sends its data, because Triton's interpreter runs a single kernel at a time
    in a process.
    """
    core, theirs = pair[1 - me]._stream_core, sources[1 - me]
    code = tensors.DTYPES[theirs.dtype]
    core.gather_slots(pair[1 - me]._stream(), theirs.data_ptr(), theirs.numel(), code)
    return pair[me].fused.add_rms_norm(sources[me], *others, EPSILON)


TYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((3, 96), (1, 1), (2, 3, 64))
LARGE = (70, 33)
IN_INTERPRETER = pytest.mark.long if DEVICE.type == "cpu" else ()
"""Triton's interpreter takes 8 to 23 s for a large shape."""


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((shape, dtype) for shape in SHAPES for dtype in TYPES),
        (LARGE, torch.bfloat16),
        *(pytest.param(LARGE, dtype, marks=IN_INTERPRETER) for dtype in TYPES[1:]),
    ],
)
@pytest.mark.slow
def test_the_fused_reduce_equals_all_reduce_and_norm(
    pair: list[DeviceCommunicator], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    residual, weight = bring(7, shape, dtype), bring(8, shape[-1:], dtype)
    for turn in range(5):  # more calls than ring entries
        me = turn % RANKS
        sources = [bring(10 * turn + rank, shape, dtype) for rank in range(RANKS)]
        assert all(each.fused.takes(source) for each, source in zip(pair, sources, strict=True))
        normed, new = fused_at(pair, me, sources, residual, weight)
        pair[me].check()
        expected = reference.reduce_add_rms_norm(torch.stack(sources), residual, weight, EPSILON)
        assert torch.equal(new, expected[1])
        torch.testing.assert_close(normed, expected[0])


def test_an_unsupported_tensor_is_refused_before_any_send(
    pair: list[DeviceCommunicator],
) -> None:
    good = ones(2, 64)
    fused = pair[0].fused
    for tensor, residual, word in (
        (ones(2, 64).double(), good, "float64"),
        (ones(0, 64), good, "bytes"),
        (ones(3, 50_000), good, "bytes"),
        (good, ones(3, 64), "residual"),
        (good, good.double(), "residual"),
    ):
        with pytest.raises(InvalidArgumentError, match=word):
            fused.add_rms_norm(tensor, residual, ones(tensor.shape[-1]), EPSILON)
    normed, _ = fused_at(pair, 0, [good, good], good, ones(64))
    torch.testing.assert_close(normed, good)


def test_ranks_of_the_same_node_are_not_fused(pair: list[DeviceCommunicator]) -> None:
    """Inside a node, ranks are summed in another order than by the fused kernel."""
    fused = FusedReduce(pair[0]._stream_core, lambda: 0, [0, 0], torch.device(DEVICE))
    assert not fused.takes(ones(2, 64))
