"""A communicator's ranks start only after all ranks have links; a failed rank fails all ranks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from pairs import free_port

from r2serve import _core
from r2serve.communicator import Communicator
from r2serve.config import Config
from r2serve.errors import InternalError, R2cclError, StartupTimeoutError

Work = Callable[[Communicator], None]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[R2cclError | None]]:
    """Starts two ranks of this process, runs `work`, and returns the error of each rank.

    `late` is called on one of the ranks after its rails are UP, before the rank checks them.
    """
    connect = _core.Engine.connect
    port = free_port()

    def run(late: Callable[[], None], work: Work) -> list[R2cclError | None]:
        def delayed(engine: _core.Engine, peers: list[int], timeout_s: float) -> None:
            if peers[0] < engine.process:
                with contextlib.suppress(StartupTimeoutError):
                    connect(engine, peers, 0.0)
                time.sleep(0.5)
                late()
            connect(engine, peers, timeout_s)

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
