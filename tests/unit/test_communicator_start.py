"""A communicator's ranks start only after all ranks have links; a failed rank fails all ranks."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from ports import free_port

from r2serve import _core, process, start
from r2serve.communicator import Communicator
from r2serve.config import Config
from r2serve.errors import ConfigError, InternalError, R2cclError, StartupTimeoutError

Work = Callable[[Communicator], None]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[R2cclError | None]]:
    """Starts two ranks of this process, runs `work`, and returns the error of each rank.

    `late` is called on one of the ranks after its rails are UP, before the rank checks them.
    """
    connect = _core.Engine.connect
    port = free_port()

    def run(late: Callable[[], None], work: Work) -> list[R2cclError | None]:
        def delayed(engine: _core.Engine, peers: list[int], timeout_s: float, option: str) -> None:
            if peers[0] < engine.process:
                with contextlib.suppress(StartupTimeoutError):
                    connect(engine, peers, 0.0)
                time.sleep(0.5)
                late()
            connect(engine, peers, timeout_s, option)

        def rank_main(rank: int) -> R2cclError | None:
            config = Config(rails="127.0.0.1", node=f"n{rank}", connect_timeout_s=60.0)
            try:
                work(
                    Communicator.standalone(
                        "127.0.0.1", port, rank, 2, config=config, share_engine=False
                    )
                )
            except R2cclError as error:
                return error
            return None

        monkeypatch.setattr(_core.Engine, "connect", delayed)
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(rank_main, range(2)))

    return run


def test_a_rank_that_closes_at_once_does_not_fail_the_others(job) -> None:
    assert job(lambda: None, Communicator.close) == [None, None]


def test_all_ranks_fail_if_one_rank_could_not_connect(job) -> None:
    def late() -> None:
        raise InternalError("no rails today")

    said = {type(error): str(error) for error in job(late, Communicator.close)}
    assert said[InternalError] == "no rails today"
    assert "did not connect: no rails today" in said[StartupTimeoutError]


@pytest.mark.parametrize("part", ["acquire", "add_peer"])
@pytest.mark.parametrize("kind", [InternalError, KeyError])
def test_all_ranks_fail_if_one_rank_cannot_start(
    monkeypatch: pytest.MonkeyPatch, part: str, kind: type[Exception]
) -> None:
    """Without the news the other rank would wait for the timeout of the store."""
    port = free_port()
    acquire, add_peer = start.acquire, process.Process.add_peer

    def refuse(rank: int) -> None:
        if rank == 1:
            raise kind("cannot start the background thread")

    def acquired(config: Config, rank: int, *others: Any) -> process.Process:
        refuse(rank)
        return acquire(config, rank, *others)

    def added(self: process.Process, *others: Any) -> None:
        refuse(self.rank_hint)
        add_peer(self, *others)

    if part == "acquire":
        monkeypatch.setattr(start, "acquire", acquired)
    else:
        monkeypatch.setattr(process.Process, "add_peer", added)

    def rank_main(rank: int) -> Exception:
        config = Config(rails="127.0.0.1", node=f"n{rank}")
        with pytest.raises((ConfigError, R2cclError, kind)) as caught:
            Communicator.standalone(
                "127.0.0.1", port, rank, 2, config=config, share_engine=False, timeout_s=100.0
            )
        return caught.value

    with ThreadPoolExecutor(2) as pool:
        other, failed = pool.map(rank_main, range(2))
    assert type(failed) is kind
    assert type(other) is ConfigError
    assert str(other).startswith("rank 1 ")
    assert str(other).endswith(f"cannot start: {failed}")


def test_call_timeout_s_ends_the_wait_for_a_store_that_is_not_there() -> None:
    port = free_port()
    limit = r"within call_timeout_s \(R2CCL_CALL_TIMEOUT_S\) of 1 s"
    with pytest.raises(
        StartupTimeoutError, match=rf"rank 1: rank 0 has no store at 127.0.0.1:{port} {limit}"
    ):
        Communicator.standalone("127.0.0.1", port, 1, 2, config=Config(call_timeout_s=1.0))


def test_without_a_thread_for_the_log_the_engine_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    closed: list[float] = []
    monkeypatch.setattr(threading.Thread, "start", refuse)
    close = _core.Engine.close
    monkeypatch.setattr(_core.Engine, "close", lambda self, s: (closed.append(s), close(self, s)))
    with pytest.raises(InternalError, match="cannot start the thread that forwards the log"):
        process.acquire(Config(rails="127.0.0.1"), 0, None, share=False)
    assert closed == [0.0]
