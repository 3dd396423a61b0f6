"""Plain values over a torch group: every rank has all, and no rank unpickles."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pairs import WAIT_S  # noqa: E402

from r2serve import group_values  # noqa: E402


class Group:
    """The two collectives of torch that the exchange uses, between threads."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._barrier = threading.Barrier(ranks, timeout=WAIT_S)
        self._told: dict[int, Any] = {}
        self.rank = threading.local()

    def get_world_size(self, _: Any) -> int:
        return self._ranks

    def all_gather(self, found: list[Any], own: Any, group: Any) -> None:
        assert all(each.shape == own.shape and each.dtype == own.dtype for each in found)
        assert own.device.type == "cpu"
        self._told[self.rank.number] = own.clone()
        self._barrier.wait()
        for rank, each in enumerate(found):
            each.copy_(self._told[rank])
        self._barrier.wait()


def gather(monkeypatch: pytest.MonkeyPatch, values: list[Any]) -> list[Any]:
    """Returns the result, or the error, of each rank."""
    group = Group(len(values))
    monkeypatch.setattr(group_values, "dist", group)

    def one(rank: int) -> Any:
        group.rank.number = rank
        try:
            return group_values.all_gather_values(values[rank], None)  # type: ignore[arg-type]
        except ValueError as error:
            return error

    with ThreadPoolExecutor(len(values)) as pool:
        return list(pool.map(one, range(len(values))))


def test_every_rank_has_the_values_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    values: list[Any] = [{"host": "a", "ports": [1, None]}, "x" * 5000, None]
    assert gather(monkeypatch, values) == [values] * 3


def test_one_rank_has_its_own_value(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gather(monkeypatch, [{"rank": 0}]) == [[{"rank": 0}]]


def test_a_value_that_is_too_long_is_an_error_on_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_values, "LONGEST_TEXT", 10)
    for error in gather(monkeypatch, ["short", "far too long"]):
        assert str(error) == "the value of rank 1 has 14 bytes; must be 1 to 10 bytes"


def test_a_pickle_is_an_error_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sent:
        def encode(self) -> bytes:
            return pickle.dumps({"rank": 0})

    monkeypatch.setattr(group_values.json, "dumps", lambda value: value)
    errors = gather(monkeypatch, [Sent(), '"good"'])
    assert all("the value of rank 0 is no JSON" in str(error) for error in errors), errors
