"""Meeting of ranks at a common store, again after any failed start.

A store keeps the keys of a start that failed halfway, and processes of that start may still wait.
So every start of a rank has a token. Rank 0 announces a meeting under its token. The other ranks
join the newest meeting with their tokens, and rank 0 answers with the tokens of the ranks it met.
A rank missing from the answer waits for the next meeting. Keys of earlier meetings are thus
ignored, and rank 0 deletes them as soon as all ranks have left these meetings.

A rank that has told its value of a round has read all values of the round before. Each rank
therefore deletes its value at the end of the next round. Values of the last round stay: outcomes of
the start, without keys.

Keys, below ``r2ccl/<name>``: ``meeting`` (the newest meeting, and meetings not deleted yet),
``<meeting>/join/<rank>``, ``<meeting>/met``, ``<meeting>/again`` (a rank wants another meeting),
``<meeting>/<round>/<rank>`` (values) and ``<meeting>/read/<rank>``.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import DistError

from r2serve.errors import StartupTimeoutError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
_ROUNDS = 8
"""Rounds of a meeting whose values are deleted; a start takes fewer."""
_KEPT = 16
"""Meetings with keys that wait for their deletion; a rank 0 that dies before leaves one more."""


def shorter_limit(call_timeout_s: float, other_s: float, other: str) -> tuple[float, str]:
    """Returns the limit of a wait in seconds, and its name for errors.

    Args:
        call_timeout_s: the option; 0: no limit.
        other_s, other: the limit without the option, and its name.
    """
    if 0 < call_timeout_s <= other_s:
        return call_timeout_s, "call_timeout_s (R2CCL_CALL_TIMEOUT_S)"
    return other_s, other


class StoreMeeting:
    """Meets the ranks at a store; calls are rounds of an exchange, like ``rendezvous.Exchange``.

    The store's timeout applies to the meeting and to each round, unless ``call_timeout_s`` is
    shorter.
    """

    def __init__(
        self, store: Store, name: str, rank: int, world_size: int, call_timeout_s: float = 0.0
    ) -> None:
        """Returns when all ranks have met.

        Args:
            call_timeout_s: the option; 0: no limit besides the store's timeout.

        Raises:
            StartupTimeoutError: a rank did not come in time, has begun another start, or the store
                is gone.
        """
        self._store = store
        self._name = name
        self._rank = rank
        self._ranks = world_size
        self._call_timeout_s = call_timeout_s
        self._token = secrets.token_hex(8)
        self._round = 0
        self._meeting = ""
        with self._store_lives():
            self._meeting = self._lead() if rank == 0 else self._follow()

    def __call__(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the values of all ranks in rank order."""
        keys = [self._key(self._round, rank) for rank in range(self._ranks)]
        with self._store_lives():
            self._store.set(keys[self._rank], json.dumps(own))
            self._await(keys, f"round {self._round} did not end", self._is_over)
            values = [json.loads(self._store.get(key)) for key in keys]
            if self._round > 0:
                self._delete(self._key(self._round - 1, self._rank))
            self._round += 1
            return values

    @contextlib.contextmanager
    def _store_lives(self) -> Iterator[None]:
        """Names the rank of the store where the store ends: a bare error of a socket helps none."""
        try:
            yield
        except DistError as error:
            first_line = str(error).partition("\n")[0]
            raise StartupTimeoutError(
                f"communicator {self._name!r}, rank {self._rank}: the store of the start is gone "
                f"({first_line}): the process of its host, usually rank 0, has "
                "ended; its log has the reason"
            ) from error

    def outlive(self, at_most_s: float) -> None:
        """Keeps rank 0's store alive until every other rank has finished its reads.

        Rank 0 waits at most ``at_most_s`` seconds, because a rank may be gone.
        """
        if not self._meeting:
            return
        with contextlib.suppress(RuntimeError):  # raised by torch if the store or a rank is gone
            if self._rank > 0:
                self._store.set(self._key("read", self._rank), "")
            else:
                others = [self._key("read", other) for other in range(1, self._ranks)]
                self._store.wait(others, timedelta(seconds=at_most_s))

    # ---- the meeting ----

    def _lead(self) -> str:
        meeting = self._token
        before = self._announced()
        self._announce([[meeting, self._ranks], *before])
        joins = [self._key("join", rank, meeting) for rank in range(1, self._ranks)]
        self._await(joins, "not all ranks came", lambda: self._succeeded(meeting))
        tokens = [self._token, *(self._store.get(key).decode() for key in joins)]
        # A rank that has joined this meeting reads no key of an earlier one.
        for token, ranks in before:
            for key in self._keys_of(token, ranks):
                self._delete(key)
        self._announce([[meeting, self._ranks]])
        self._store.set(self._key("met", meeting=meeting), json.dumps(tokens))
        return meeting

    def _follow(self) -> str:
        joined = refused = ""
        for _ in self._pauses("rank 0 did not meet this rank"):
            newest = self._newest()
            if newest and newest != joined:
                self._store.set(self._key("join", self._rank, newest), self._token)
                joined = newest
            met = self._key("met", meeting=joined)
            if not joined or joined == refused or not self._store.check([met]):
                continue
            tokens = json.loads(self._store.get(met))
            if len(tokens) > self._rank and tokens[self._rank] == self._token:
                return joined
            # That meeting met an earlier start of this rank.
            self._store.set(self._key("again", meeting=joined), str(self._rank))
            refused = joined
        raise AssertionError("the pauses end with an error")

    def _is_over(self) -> str:
        """Returns why this meeting will not go on; empty: it may."""
        again = self._key("again")
        if self._store.check([again]):
            return f"rank {self._store.get(again).decode()} has begun another start"
        return self._succeeded(self._meeting)

    def _succeeded(self, meeting: str) -> str:
        return "" if self._newest() == meeting else "rank 0 has begun another start"

    def _announced(self) -> list[Any]:
        key = f"r2ccl/{self._name}/meeting"
        if not self._store.check([key]):
            return []
        found: list[Any] = json.loads(self._store.get(key))
        return found

    def _newest(self) -> str:
        return str(next(iter(self._announced()), [""])[0])

    def _announce(self, meetings: list[Any]) -> None:
        self._store.set(f"r2ccl/{self._name}/meeting", json.dumps(meetings[:_KEPT]))

    # ---- waiting ----

    def _await(self, keys: list[str], what: str, is_over: Callable[[], str]) -> None:
        for _ in self._pauses(what, keys):
            if self._store.check(keys):
                return
            # Ranks that finished this round may be in their next start, so the keys come first.
            if (why := is_over()) and not self._store.check(keys):
                raise StartupTimeoutError(f"communicator {self._name!r}: {why}; start again")

    def _pauses(self, what: str, keys: list[str] | None = None) -> Iterator[None]:
        """Yields between pauses, until the limit of the wait.

        Raises:
            StartupTimeoutError: names the ranks without a key.
        """
        store_s = self._store.timeout.total_seconds()  # type: ignore[attr-defined]
        limit_s, limit = shorter_limit(self._call_timeout_s, store_s, "the store's timeout")
        deadline = time.monotonic() + limit_s
        pause_s = _FIRST_PAUSE_S
        while True:
            yield
            if time.monotonic() > deadline:
                break
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        missing = [key.rpartition("/")[2] for key in keys or () if not self._store.check([key])]
        who = f"; missing: rank {', '.join(missing)}" if missing else ""
        raise StartupTimeoutError(
            f"communicator {self._name!r}, rank {self._rank}: {what} within {limit} of "
            f"{limit_s:g} s{who}"
        )

    # ---- keys ----

    def _key(self, kind: str | int, rank: int | None = None, meeting: str | None = None) -> str:
        key = f"r2ccl/{self._name}/{self._meeting if meeting is None else meeting}/{kind}"
        return key if rank is None else f"{key}/{rank}"

    def _keys_of(self, meeting: str, ranks: int) -> Iterator[str]:
        for kind in ("met", "again"):
            yield self._key(kind, meeting=meeting)
        for kind in ("join", "read", *map(str, range(_ROUNDS))):
            for rank in range(ranks):
                yield self._key(kind, rank, meeting)

    def _delete(self, key: str) -> None:
        with contextlib.suppress(NotImplementedError):  # raised by stores that cannot delete
            self._store.delete_key(key)
