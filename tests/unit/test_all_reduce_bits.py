"""Bits of an all-reduce in the simulator: only inputs and nodes decide them.

Algorithm, shares, blocks, size of the messages, a rail lost on the way and the size of the batch
change no bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from r2serve import _core
from r2serve.errors import InvalidArgumentError

# Every run uses the same examples; the tests do not measure time.
fuzz = settings(
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)

F16, F32, I32, SUM = 0, 2, 6, 0
CODES = {np.dtype(np.float16): F16, np.dtype(np.float32): F32, np.dtype(np.int32): I32}
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Way:
    """A way to the result: everything that must change no bit."""

    one_shot: bool
    lost: list[int]
    chunk_bytes: int
    slot_bytes: int
    rails: int
    in_place: bool
    cut: tuple[int, int, float] | None
    seed: int


def reduced(inputs: list[Array], nodes: list[int], way: Way) -> list[Array]:
    results = _core.simulate_all_reduce(
        [each.tobytes() for each in inputs],
        nodes,
        CODES[inputs[0].dtype],
        SUM,
        one_shot=way.one_shot,
        lost=way.lost,
        chunk_bytes=way.chunk_bytes,
        slot_bytes=way.slot_bytes,
        rails=way.rails,
        in_place=way.in_place,
        cut=way.cut,
        seed=way.seed,
    )
    return [np.frombuffer(each, inputs[0].dtype) for each in results]


def canonical(inputs: list[Array], nodes: list[int]) -> Array:
    """Adds the ranks of each node in rank order, then the nodes in the order of their first rank.

    Halves are added as float32, and rounded at the node's end if the node has several ranks.
    """
    dtype = inputs[0].dtype
    wide = np.float32 if dtype == np.float16 else dtype
    sums = []
    for node in dict.fromkeys(nodes):
        ranks = [rank for rank, label in enumerate(nodes) if label == node]
        total = inputs[ranks[0]].astype(wide)
        for rank in ranks[1:]:
            total = total + inputs[rank].astype(wide)
        if len(ranks) > 1:
            total = total.astype(dtype).astype(wide)
        sums.append(total)
    result = sums[0]
    for each in sums[1:]:
        result = result + each
    return result.astype(dtype)


@st.composite
def ways(draw: st.DrawFn, ranks: int) -> Way:
    chunk = draw(st.sampled_from([64, 128, 1024]))
    rails = draw(st.integers(1, 3))
    cut = None
    if rails > 1 and draw(st.booleans()):
        cut = (
            draw(st.integers(0, ranks - 1)),
            draw(st.integers(0, rails - 1)),
            draw(st.floats(0, 2000)),
        )
    return Way(
        one_shot=draw(st.integers(0, 4)) == 0,
        lost=draw(st.lists(st.integers(0, 15), min_size=ranks, max_size=ranks)),
        chunk_bytes=chunk,
        slot_bytes=chunk * draw(st.integers(1, 4)),
        rails=rails,
        in_place=draw(st.booleans()),
        cut=cut,
        seed=draw(st.integers(0, 1 << 32)),
    )


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[Array], list[int], Way, Way]:
    """Draws inputs, nodes, and two ways to the result."""
    ranks = draw(st.integers(2, 6))
    nodes = draw(st.lists(st.integers(0, ranks - 1), min_size=ranks, max_size=ranks))
    dtype = draw(st.sampled_from(sorted(CODES, key=str)))
    count = draw(st.integers(1, 6000))
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    # Values of very different size, so that the order of additions shows in the bits.
    spread = 10.0 ** random.integers(-3, 4, (ranks, count))
    inputs = [(random.standard_normal(count) * spread[rank]).astype(dtype) for rank in range(ranks)]
    return inputs, nodes, draw(ways(ranks)), draw(ways(ranks))


@settings(fuzz, max_examples=150)
@given(jobs())
def test_only_inputs_and_nodes_decide_the_bits(
    job: tuple[list[Array], list[int], Way, Way],
) -> None:
    inputs, nodes, way, _ = job
    expected = canonical(inputs, nodes).tobytes()
    for result in reduced(inputs, nodes, way):
        assert result.tobytes() == expected


@settings(fuzz, max_examples=75)
@given(jobs(), st.floats(0, 1))
def test_an_element_has_the_same_bits_in_any_batch(
    job: tuple[list[Array], list[int], Way, Way], at: float
) -> None:
    inputs, nodes, way, other = job
    border = round(at * (inputs[0].size - 1))
    whole = reduced(inputs, nodes, way)[0]
    rest = reduced([each[border:] for each in inputs], nodes, other)[0]
    assert rest.tobytes() == whole[border:].tobytes()


def test_the_order_of_the_nodes_shows_in_the_bits() -> None:
    """A check of the check: other nodes give other bits of the same inputs."""
    random = np.random.default_rng(1)
    inputs = [random.standard_normal(1000).astype(np.float32) for _ in range(4)]
    way = Way(False, [0, 8, 0, 0], 64, 64, 2, False, None, 1)
    apart, paired = (reduced(inputs, nodes, way)[0] for nodes in ([0, 1, 2, 3], [0, 1, 1, 0]))
    assert apart.tobytes() != paired.tobytes()
    assert np.allclose(apart, paired, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"nodes": [0]}, "nodes: must have a label for each rank"),
        ({"lost": [1]}, "lost: must have a loss for each rank"),
        ({"slot_bytes": 100}, "slot_bytes: must be a multiple"),
        ({"rails": 0}, "rails: must be from 1 to 8"),
        ({"rails": 1, "cut": (0, 0, 1.0)}, "cut: must name a rank"),
        ({"inputs": [b"12", b"12"]}, "inputs: must have whole elements"),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, Any], text: str) -> None:
    arguments: dict[str, Any] = {
        "inputs": [bytes(64), bytes(64)],
        "nodes": [0, 1],
        "dtype": F32,
        "op": SUM,
    }
    with pytest.raises(InvalidArgumentError, match=text):
        _core.simulate_all_reduce(**{**arguments, **changes})
