"""Descriptions of tensor dicts between pipeline stages, as MessagePack.

A peer's bytes never become anything but plain values, shapes and dtypes. vLLM's own description is
a pickle, and a pickle may run any code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import torch

from r2serve.errors import InvalidArgumentError

LONGEST = 16 << 20
"""Bytes of a description, at most."""

_DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


class Described(NamedTuple):
    """A tensor of the dict; its elements follow the description."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _Tensor(msgspec.Struct, tag="tensor", forbid_unknown_fields=True):
    shape: list[int]
    dtype: str


class _Plain(msgspec.Struct, tag="plain", forbid_unknown_fields=True):
    value: Any


class _Tuple(msgspec.Struct, tag="tuple", forbid_unknown_fields=True):
    value: list[Any]


_DECODER = msgspec.msgpack.Decoder(dict[str, _Tensor | _Plain | _Tuple])


def encode(values: Mapping[str, torch.Tensor | Any]) -> bytes:
    """Describes a dict of tensors and plain values.

    Plain values are None, bool, int, float, str, bytes, lists and dicts of plain values. A tuple of
    plain values may stand directly in the dict.

    Raises:
        InvalidArgumentError: a value would not arrive as it is, or the description is too long.
    """
    text = msgspec.msgpack.encode({key: _described(key, each) for key, each in values.items()})
    if len(text) > LONGEST:
        raise InvalidArgumentError(
            f"tensor_dict: its description has {len(text)} bytes; must be at most {LONGEST} bytes"
        )
    return text


def _described(key: str, value: Any) -> _Tensor | _Plain | _Tuple:
    if isinstance(value, torch.Tensor):
        return _Tensor(list(value.shape), str(value.dtype))
    plain = list(value) if type(value) is tuple else value
    try:
        arrives = msgspec.msgpack.decode(msgspec.msgpack.encode(plain))
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgumentError(_not_plain(key, value)) from error
    if type(arrives) is not type(plain) or repr(arrives) != repr(plain):  # equal: NaN is not
        raise InvalidArgumentError(_not_plain(key, value))
    return _Tuple(plain) if type(value) is tuple else _Plain(plain)


def _not_plain(key: str, value: Any) -> str:
    return (
        f"tensor_dict[{key!r}] is a {type(value).__name__} that does not arrive as it is; must be "
        "a tensor, or None, bool, int, float, str, bytes, and lists, dicts and tuples of these"
    )


def checked_length(length: int) -> int:
    """Returns the length of a description in bytes, as a peer told it.

    Raises:
        InvalidArgumentError: the length is out of range.
    """
    if not 0 < length <= LONGEST:
        raise InvalidArgumentError(
            f"the description of a tensor dict has {length} bytes; must be 1 to {LONGEST} bytes"
        )
    return length


def decode(text: bytes) -> dict[str, Described | Any]:
    """Reads a description: tensors as :class:`Described`, other values as they were.

    Raises:
        InvalidArgumentError: the description is malformed.
    """
    try:
        found = _DECODER.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidArgumentError(
            f"the description of a tensor dict is malformed ({error}); must be sent by "
            "send_tensor_dict of the same release"
        ) from error
    return {key: _value(key, each) for key, each in found.items()}


def _value(key: str, described: _Tensor | _Plain | _Tuple) -> Any:
    if isinstance(described, _Plain):
        return described.value
    if isinstance(described, _Tuple):
        return tuple(described.value)
    if described.dtype not in _DTYPES or any(size < 0 for size in described.shape):
        raise InvalidArgumentError(
            f"tensor {key!r} has shape {described.shape} and dtype {described.dtype!r}; must be a "
            "shape without negative sizes and a dtype of this torch"
        )
    return Described(tuple(described.shape), _DTYPES[described.dtype])
