"""Ranks meet at a common store, again after any failed start."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed
from ports import free_port
from timely import timely

from r2serve.errors import StartupTimeoutError
from r2serve.store_meeting import StoreMeeting

pytestmark = pytest.mark.slow

LONG_S = 120.0
"""Timeout of starts that must succeed."""
Values = list[dict[str, Any]]


class DiedError(Exception):
    """Stands for the end of a process."""


class Client:
    """A process's connection to the store; the process dies at operation ``dies_at``."""

    def __init__(self, store: Any, timeout_s: float = LONG_S, dies_at: int = 0) -> None:
        self._store = store
        self.timeout = timedelta(seconds=timeout_s)
        self.operations = 0
        self._dies_at = dies_at

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._store, name)

        def counted(*args: Any) -> Any:
            self.operations += 1
            if self._dies_at and self.operations >= self._dies_at:
                raise DiedError(name)
            return operation(*args)

        return counted


def test_a_store_that_is_gone_is_named() -> None:
    """A rank gets an error of the start, not a bare error of a socket."""

    class Gone:
        timeout = timedelta(seconds=LONG_S)

        def check(self, _: list[str]) -> bool:
            raise torch.distributed.DistNetworkError("Connection reset by peer")

    with pytest.raises(StartupTimeoutError, match=r"rank 1: the store .* gone \(Connection reset"):
        StoreMeeting(Gone(), "x", 1, 2)  # type: ignore[arg-type]


def start(client: Client, rank: int, ranks: int, rounds: int = 2) -> list[Values]:
    """Meets, and exchanges values that name rank and round."""
    meeting = StoreMeeting(client, "x", rank, ranks)  # type: ignore[arg-type]
    found = [meeting({"rank": rank, "round": number}) for number in range(rounds)]
    meeting.outlive(0.01)  # 0 would be without limit in torch
    return found


def right(ranks: int, rounds: int = 2) -> list[Values]:
    return [[{"rank": rank, "round": number} for rank in range(ranks)] for number in range(rounds)]


@pytest.fixture
def pool() -> Any:
    with ThreadPoolExecutor(8) as made:
        yield made


def all_ranks(pool: ThreadPoolExecutor, store: Any, ranks: int) -> list[list[Values]]:
    return list(pool.map(lambda rank: start(Client(store), rank, ranks), range(ranks)))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_name_is_used_again_and_again_and_leaves_no_more_keys(pool: Any, ranks: int) -> None:
    store = torch.distributed.HashStore()
    for _ in range(2):
        assert all_ranks(pool, store, ranks) == [right(ranks)] * ranks
    kept = store.num_keys()
    for _ in range(20):
        assert all_ranks(pool, store, ranks) == [right(ranks)] * ranks
    assert store.num_keys() <= kept + ranks  # at most a mark of one rank that came early


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_value_is_deleted_once_all_ranks_have_read_it(pool: Any, ranks: int) -> None:
    """Ranks tell their addresses and public keys first; no reader comes later."""
    store = torch.distributed.HashStore()
    made = [pool.submit(StoreMeeting, Client(store), "x", rank, ranks) for rank in range(ranks)]
    meetings = [each.result(LONG_S) for each in made]
    for number in range(3):
        told = [{"round": number, "rank": rank} for rank in range(ranks)]
        rounds = [pool.submit(meetings[rank], told[rank]) for rank in range(ranks)]
        assert [each.result(LONG_S) for each in rounds] == [told] * ranks
        for rank in range(ranks):
            kept = [store.check([meetings[rank]._key(each, rank)]) for each in range(number + 1)]
            assert kept == [False] * number + [True]


@pytest.mark.parametrize("dead", [0, 1])
def test_all_meet_after_a_rank_died_anywhere(pool: Any, dead: int) -> None:
    """Rank ``dead`` dies at each operation on the store; then all ranks start once more."""
    for dies_at in range(1, 25):  # a start needs fewer operations, unless it polls often
        store = torch.distributed.HashStore()

        def first(rank: int, store: Any = store, dies_at: int = dies_at) -> None:
            client = Client(store, 0.1, dies_at if rank == dead else 0)
            with contextlib.suppress(DiedError, StartupTimeoutError):
                start(client, rank, 2)

        list(pool.map(first, range(2)))
        assert all_ranks(pool, store, 2) == [right(2)] * 2, dies_at


def test_a_restarted_rank_meets_the_others_although_they_still_wait(pool: Any) -> None:
    """Ranks 0 and 2 wait in a round for rank 1, which died; rank 1 starts again."""
    store = torch.distributed.HashStore()
    waiting = [Client(store), Client(store)]
    first: list[Future[Any]] = [
        pool.submit(start, client, rank, 3) for client, rank in zip(waiting, (0, 2), strict=True)
    ]
    dead = StoreMeeting(Client(store), "x", 1, 3)  # type: ignore[arg-type]
    in_round = [dead._key(0, rank) for rank in (0, 2)]
    timely(lambda: store.check(in_round), "ranks 0 and 2 wait in the first round")
    again = pool.submit(start, Client(store), 1, 3)
    for each in first:
        with pytest.raises(StartupTimeoutError, match="rank 1 has begun another start"):
            each.result(LONG_S)
    others = [pool.submit(start, Client(store), rank, 3) for rank in (0, 2)]
    for each in (again, *others):
        assert each.result(LONG_S) == right(3)


def test_a_wait_for_a_restarted_rank_0_ends(pool: Any) -> None:
    store = torch.distributed.HashStore()
    waiting = pool.submit(start, Client(store), 1, 2)
    dead = StoreMeeting(Client(store), "x", 0, 2)  # type: ignore[arg-type]
    timely(lambda: store.check([dead._key(0, 1)]), "rank 1 waits in the first round")
    again = pool.submit(start, Client(store), 0, 2)
    with pytest.raises(StartupTimeoutError, match="rank 0 has begun another start"):
        waiting.result(LONG_S)
    assert start(Client(store), 1, 2) == right(2)
    assert again.result(LONG_S) == right(2)


def test_an_early_mark_of_the_next_start_harms_no_slow_reader(pool: Any) -> None:
    """Rank 1 begins its next start while rank 2 still reads the last round."""
    store = torch.distributed.HashStore()
    made = [pool.submit(StoreMeeting, Client(store), "x", rank, 3) for rank in range(3)]
    meetings = [each.result(LONG_S) for each in made]
    for rank in (0, 1, 2):
        store.set(meetings[rank]._key(0, rank), "{}")
    early = pool.submit(start, Client(store), 1, 3)
    timely(lambda: store.check([meetings[0]._key("again")]), "rank 1 wants another start")
    assert meetings[2]({}) == [{}, {}, {}]
    others = [pool.submit(start, Client(store), rank, 3) for rank in (0, 2)]
    assert [each.result(LONG_S) for each in (early, *others)] == [right(3)] * 3


def test_the_missing_ranks_are_named() -> None:
    store = torch.distributed.HashStore()
    with pytest.raises(
        StartupTimeoutError, match=r"not all ranks came within .* 0.05 s; missing: rank 1, 2"
    ):
        StoreMeeting(Client(store, 0.05), "x", 0, 3)  # type: ignore[arg-type]
    with pytest.raises(StartupTimeoutError, match="rank 1: rank 0 did not meet this rank within"):
        StoreMeeting(Client(store, 0.05), "x", 1, 3)  # type: ignore[arg-type]


def test_call_timeout_s_ends_a_meeting_and_a_round(pool: Any) -> None:
    """The store's timeout is longer."""
    limit = r"within call_timeout_s \(R2CCL_CALL_TIMEOUT_S\) of 1 s"
    store = torch.distributed.HashStore()
    with pytest.raises(StartupTimeoutError, match=f"rank 0: not all ranks came {limit}; .* rank 1"):
        StoreMeeting(Client(store), "x", 0, 2, 1.0)  # type: ignore[arg-type]
    with pytest.raises(StartupTimeoutError, match=f"rank 1: rank 0 did not meet this rank {limit}"):
        StoreMeeting(Client(store), "x", 1, 2, 1.0)  # type: ignore[arg-type]
    silent = pool.submit(StoreMeeting, Client(store), "y", 1, 2)
    meeting = StoreMeeting(Client(store), "y", 0, 2, LONG_S)  # type: ignore[arg-type]
    silent.result(LONG_S)
    meeting._call_timeout_s = 1.0  # of the round alone: a starved machine may meet later
    with pytest.raises(StartupTimeoutError, match=f"round 0 did not end {limit}; missing: rank 1"):
        meeting({})


def test_a_tcp_store_under_a_prefix_serves_too(pool: Any) -> None:
    port = free_port()
    served = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    prefixed = torch.distributed.PrefixStore("job", served)
    for _ in range(3):
        found = list(pool.map(lambda rank: _real(prefixed, rank), range(2)))
        assert found == [right(2)] * 2


def _real(store: Any, rank: int) -> list[Values]:
    meeting = StoreMeeting(store, "x", rank, 2)
    return [meeting({"rank": rank, "round": number}) for number in range(2)]
