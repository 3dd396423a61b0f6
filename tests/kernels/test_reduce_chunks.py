"""The sum of slots has the bits of the reference and of the core, for any numbers."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import DEVICE, DTYPES, from_bits, hard_pairs, normal, random_bits, same_bits
from ports import free_port

from r2serve.communicator import Communicator
from r2serve.config import Config
from r2serve.errors import InvalidArgumentError
from r2serve.kernels import reference
from r2serve.kernels.reduce_chunks import reduce_chunks


def on_device(values: list[list[float]], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([values], dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("peers", range(1, 17))
def test_every_number_of_peers(peers: int, dtype: torch.dtype) -> None:
    slots = random_bits((1, peers, 257), dtype, seed=peers)
    assert same_bits(reduce_chunks(slots), reference.reduce_chunks(slots[0]))


@pytest.mark.parametrize("count", [1, 3, 127, 128, 129, 1000, 1024, 1025, 4099])
def test_any_number_of_elements(count: int) -> None:
    slots = normal((1, 3, count), torch.bfloat16, seed=count)
    assert same_bits(reduce_chunks(slots), reference.reduce_chunks(slots[0]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pair_of_hard_numbers(dtype: torch.dtype) -> None:
    slots = hard_pairs(dtype)
    assert same_bits(reduce_chunks(slots[None]), reference.reduce_chunks(slots))


@settings(max_examples=40, deadline=None)
@given(
    peers=st.integers(1, 16),
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32 - 1),
)
def test_random_shapes_of_random_bits(
    peers: int, shape: list[int], dtype: torch.dtype, seed: int
) -> None:
    slots = random_bits((1, peers, *shape), dtype, seed)
    assert same_bits(reduce_chunks(slots), reference.reduce_chunks(slots[0]))


def test_peers_are_added_in_rank_order() -> None:
    slots = on_device([[1e8, 1.0, 1.0], [1.0, 1e8, -1e8], [-1e8, -1e8, 1e8]], torch.float32)
    assert reduce_chunks(slots).tolist() == [0.0, 0.0, 0.0]
    slots = on_device([[1e8, -1e8], [-1e8, 1e8], [1.0, 1.0]], torch.float32)
    assert reduce_chunks(slots).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("dtype", "ulp"), [(torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10)])
def test_narrow_formats_are_rounded_once_and_to_even(dtype: torch.dtype, ulp: float) -> None:
    half = ulp / 2
    columns = [
        ([1.0, half, half], 1.0 + ulp),  # with a rounding at each step, the result would be 1
        ([1.0, half, 0.0], 1.0),  # a tie, down to even
        ([1.0 + ulp, half, 0.0], 1.0 + 2 * ulp),  # a tie, up to even
        ([1.0, half, 2.0**-14], 1.0 + ulp),  # just above the tie
        ([2.0 - ulp, half, 0.0], 2.0),  # a carry into the exponent
    ]
    slots = torch.tensor([column for column, _ in columns]).T.to(dtype)[None].to(DEVICE)
    assert reduce_chunks(slots.contiguous()).tolist() == [expected for _, expected in columns]


@pytest.mark.parametrize("dtype", DTYPES)
def test_negative_zero_alone_stays(dtype: torch.dtype) -> None:
    zeros = torch.zeros(1, 2, 4, dtype=dtype, device=DEVICE)
    assert not torch.signbit(reduce_chunks(zeros)).any()
    assert torch.signbit(reduce_chunks(-zeros)).all()
    assert torch.signbit(reduce_chunks(-zeros[:, :1])).all()


@pytest.mark.parametrize(
    ("dtype", "nans", "quiet"),
    [
        (torch.float16, (0xFE01, 0x7C01), 0x7E00),
        (torch.bfloat16, (0xFFC1, 0x7F81), 0x7FC0),
        (torch.float32, (0xFFC00001, 0x7F800001), 0x7FC00000),
    ],
)
def test_every_nan_becomes_the_same_quiet_nan(
    dtype: torch.dtype, nans: tuple[int, ...], quiet: int
) -> None:
    alone = from_bits(nans, dtype)[None, None]
    assert same_bits(reduce_chunks(alone), from_bits((quiet, quiet), dtype))
    infinities = on_device([[torch.inf], [-torch.inf]], dtype)
    assert same_bits(reduce_chunks(infinities), from_bits((quiet,), dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_core_gives_the_same_bits(dtype: torch.dtype) -> None:
    """Three ranks in this process, each on a separate node, all-reduce the same slots."""
    ranks = 3
    slots = torch.cat([random_bits((ranks, 500), dtype), hard_pairs(dtype).repeat(2, 1)[:ranks]], 1)
    inputs = slots.cpu()
    sums: list[torch.Tensor | None] = [None] * ranks
    config = Config(rails="127.0.0.1", node="per-rank")
    port = free_port()

    def run(rank: int) -> None:
        with Communicator.standalone(
            "127.0.0.1", port, rank, ranks, config=config, share_engine=False
        ) as communicator:
            sums[rank] = communicator.all_reduce(inputs[rank].clone())

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    on_chip = reduce_chunks(slots[None]).cpu()
    for total in sums:
        assert total is not None
        assert same_bits(on_chip, total)


def test_slots_may_be_part_of_larger_ones() -> None:
    whole = normal((4, 3, 1000), torch.bfloat16)
    part = whole[1:2, :, 7:207]  # neither aligned nor dense
    assert same_bits(reduce_chunks(part), reference.reduce_chunks(part[0]))
    rows = normal((1, 3, 8, 40), torch.float16)[:, :, 2:5]
    assert same_bits(reduce_chunks(rows), reference.reduce_chunks(rows[0]))


def test_the_result_is_written_only_into_the_given_output() -> None:
    slots = normal((1, 2, 129), torch.float32)
    memory = torch.full((131,), 7.0, device=DEVICE)
    out = memory[1:130]
    assert reduce_chunks(slots, out=out) is out
    assert same_bits(out, reference.reduce_chunks(slots[0]))
    assert memory[0] == memory[130] == 7.0


def test_nothing_to_sum_is_no_error() -> None:
    assert reduce_chunks(torch.empty(1, 2, 0, 5, device=DEVICE)).shape == (0, 5)


SLOTS = torch.zeros(1, 2, 8, device=DEVICE)
MEMORY = torch.zeros(64, device=DEVICE)
REFUSED = {
    "dtype": (
        lambda: reduce_chunks(SLOTS.double()),
        "slots: dtype torch.float64 is none of float16, bfloat16, float32",
    ),
    "dimensions": (lambda: reduce_chunks(SLOTS[0]), r"slots: shape \(2, 8\); it must be \(ring"),
    "no peers": (lambda: reduce_chunks(SLOTS[:, :0]), "has 0 peers; it must have 1 to 16"),
    "peers": (lambda: reduce_chunks(torch.zeros(1, 17, 8, device=DEVICE)), "has 17 peers"),
    "ring": (
        lambda: reduce_chunks(torch.zeros(2, 2, 8, device=DEVICE)),
        "has a ring of 2; without an arrival it must be 1",
    ),
    "strides": (
        lambda: reduce_chunks(SLOTS[..., ::2]),
        r"slots: shape \(1, 2, 4\), strides \(16, 8, 2\) has slots that are not contiguous",
    ),
    "rows apart": (
        lambda: reduce_chunks(SLOTS.view(1, 2, 2, 4)[..., :3]),
        "has slots that are not contiguous",
    ),
    "shape of out": (
        lambda: reduce_chunks(SLOTS, out=MEMORY[:7]),
        r"out: \(7,\) of torch.float32 where \(8,\) of float32 is needed",
    ),
    "dtype of out": (
        lambda: reduce_chunks(SLOTS, out=MEMORY[:8].half()),
        r"out: \(8,\) of torch.float16 where \(8,\) of float32 is needed",
    ),
    "strides of out": (
        lambda: reduce_chunks(SLOTS, out=MEMORY[:16:2]),
        r"out: shape \(8,\), strides \(2,\) is not contiguous",
    ),
    "device": (
        lambda: reduce_chunks(torch.zeros(1, 2, 8, device="meta")),
        "slots: is on meta; it must be on a CUDA device",
    ),
    "device of out": (
        lambda: reduce_chunks(SLOTS, out=torch.zeros(8, device="meta")),
        "out: is on meta; it must be on",
    ),
    "overlap": (
        lambda: reduce_chunks(MEMORY[:16].view(1, 2, 8), out=MEMORY[15:23]),
        "out: overlaps slots in memory",
    ),
    "in place": (lambda: reduce_chunks(SLOTS, out=SLOTS[0, 0]), "out: overlaps slots"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments_are_refused(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(InvalidArgumentError, match=message):
        call()


def test_memory_right_behind_the_slots_is_no_overlap() -> None:
    reduce_chunks(MEMORY[:16].view(1, 2, 8), out=MEMORY[16:24])
