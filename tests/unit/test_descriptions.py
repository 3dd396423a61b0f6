"""Descriptions of tensor dicts: what arrives, and what is refused."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("msgspec")

from r2serve.engines.vllm import descriptions  # noqa: E402
from r2serve.engines.vllm.descriptions import LONGEST, Described  # noqa: E402
from r2serve.errors import InvalidArgumentError  # noqa: E402


def test_tensors_and_plain_values_arrive_as_they_were() -> None:
    plain = {
        "none": None,
        "note": ("text", 7),
        "list": [1, 2.5, {"a": True}],
        "bytes": b"x",
        "text": "ü\n",
        "minus": -(2**63),
    }
    tensors = {
        "hidden": torch.zeros(4, 6, dtype=torch.bfloat16).t(),
        "empty": torch.empty(0, 6),
        "scalar": torch.tensor(1),
        "scales": torch.zeros(2, dtype=torch.uint8).view(torch.float8_e4m3fn),
    }
    found = descriptions.decode(descriptions.encode(plain | tensors))
    assert list(found) == [*plain, *tensors]
    assert {key: found[key] for key in plain} == plain
    for key, tensor in tensors.items():
        assert found[key] == Described(tuple(tensor.shape), tensor.dtype)


@pytest.mark.parametrize(
    "value", [{1, 2}, [(1, 2)], 2**70, object(), torch.Size([1]), {"inner": torch.zeros(1)}]
)
def test_what_would_not_arrive_is_refused_by_the_sender(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"tensor_dict\['key'\] is a \w+ that does not"):
        descriptions.encode({"key": value})


def test_a_description_that_is_too_long_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="must be at most"):
        descriptions.encode({"key": "x" * LONGEST})
    for length in (0, -1, LONGEST + 1, 2**63 - 1):
        with pytest.raises(InvalidArgumentError, match="the description of a tensor dict has"):
            descriptions.checked_length(length)


class Runs:
    """An object whose pickle runs code."""

    ran: list[int] = []  # noqa: RUF012  of the class on purpose

    def __reduce__(self) -> tuple[Any, ...]:
        return Runs.ran.append, (1,)


def test_a_pickle_of_a_peer_is_refused_and_runs_nothing() -> None:
    text = pickle.dumps({"key": Runs()})
    with pytest.raises(InvalidArgumentError, match="malformed"):
        descriptions.decode(text)
    assert Runs.ran == []


@pytest.mark.parametrize("kept", range(0, 40, 3))
def test_a_shortened_description_is_refused(kept: int) -> None:
    text = descriptions.encode({"hidden": torch.zeros(4, 6), "note": ("text", 7)})
    with pytest.raises(InvalidArgumentError, match="malformed"):
        descriptions.decode(text[:kept])


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [([-1], "torch.float32"), ([1], "torch.nn"), ([1], "os.system"), ([1], "float32")],
)
def test_a_shape_or_dtype_that_cannot_be_is_refused(shape: list[int], dtype: str) -> None:
    import msgspec

    text = msgspec.msgpack.encode({"key": {"type": "tensor", "shape": shape, "dtype": dtype}})
    with pytest.raises(InvalidArgumentError, match=r"tensor 'key' has shape .* and dtype"):
        descriptions.decode(text)
