"""Ranks compare steps and call sites: programs that part get an error that names both places."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ports import free_port
from timely import timely

from r2serve import sites
from r2serve.communicator import Communicator
from r2serve.config import Config
from r2serve.errors import (
    ConfigError,
    InvalidArgumentError,
    OrderMismatchError,
    R2cclError,
)


def join_all(threads: list[threading.Thread]) -> None:
    """Waits for all threads together; a call without an end is a hang."""
    ends = time.monotonic() + 300
    for thread in threads:
        thread.join(max(0.0, ends - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads)


def run_pair(
    body: Callable[[Communicator], None], **options: str | int
) -> list[OrderMismatchError | None]:
    """Runs ``body`` on two ranks with a thread each; returns each rank's mismatch."""
    errors: list[OrderMismatchError | None] = [None, None]
    others: list[BaseException] = []
    port = free_port()
    config = Config(rails="127.0.0.1", node="per-rank", **options)  # type: ignore[arg-type]

    def run(rank: int) -> None:
        communicator = Communicator.standalone(
            "127.0.0.1", port, rank, 2, config=config, share_engine=False
        )
        try:
            body(communicator)
        except OrderMismatchError as error:
            errors[rank] = error
        except BaseException as error:  # noqa: BLE001  raised again below
            others.append(error)
        finally:
            communicator.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    join_all(threads)
    if others:
        raise others[0]
    return errors


def part_in_the_middle(communicator: Communicator) -> None:
    """Rank 1 makes a call that rank 0 leaves out; all calls have equal shapes."""
    data = torch.ones(8)
    communicator.all_reduce(data)
    if communicator.rank == 1:
        communicator.all_reduce(data)
    communicator.all_reduce(data)


def lines_of(function: Callable[..., None], call: str) -> list[str]:
    """Returns the places of the calls in ``function``, as the sites name them."""
    source = Path(__file__).read_text().splitlines()
    first = function.__code__.co_firstlineno
    lines = [first + i for i, line in enumerate(source[first - 1 : first + 8]) if call in line]
    return [sites.place(__name__, __file__, line) for line in lines]


def test_programs_that_part_get_both_sites_on_both_ranks() -> None:
    errors = run_pair(part_in_the_middle, consensus="site-error")
    _, middle, last = lines_of(part_in_the_middle, ".all_reduce(")
    call = "call 1: all_reduce(sum, float32, 8 elements, one_shot)"
    places = (f"rank 0 in {call} at {last}", f"rank 1 in {call} at {middle}")
    said = [str(error) for error in errors]
    assert all(own in text for own, text in zip(places, said, strict=True)), said
    # The position of the other rank is left out if it does not arrive within 500 ms.
    timely(
        lambda: all(place in text for place in places for text in said),
        f"both ranks know the sites of both: {said}",
        within_s=0,
    )


def test_a_skipped_call_is_found_at_the_end_of_its_step() -> None:
    def body(communicator: Communicator) -> None:
        with communicator.step(4, about=f"request-{communicator.rank}"):
            part_in_the_middle(communicator)

    texts = [str(error) for error in run_pair(body, consensus="step")]
    for rank, text in enumerate(texts):
        assert "step 4" in text
        assert f"rank {rank}" in text
        assert f"request-{rank}" in text
    # The position of the other rank is left out if it does not arrive within 500 ms.
    timely(
        lambda: all(
            f"rank {other}" in text and f"request-{other}" in text
            for text, other in zip(texts, (1, 0), strict=True)
        ),
        f"the errors name the positions of both ranks: {texts}",
        within_s=0,
    )


def test_a_new_step_ends_the_step_before() -> None:
    def body(communicator: Communicator) -> None:
        communicator.step(1)
        part_in_the_middle(communicator)
        communicator.step(2)

    assert all(run_pair(body, consensus="step"))


def fail_in_a_step(communicator: Communicator) -> None:
    with communicator.step(1):
        if communicator.rank == 1:
            communicator.broadcast(torch.ones(1), 1)  # a comparison would find this call
        raise ZeroDivisionError


def test_an_exception_in_a_step_is_not_hidden_by_a_comparison() -> None:
    def body(communicator: Communicator) -> None:
        with pytest.raises(ZeroDivisionError):
            fail_in_a_step(communicator)

    assert run_pair(body, consensus="step") == [None, None]


def test_names_stand_for_lines() -> None:
    def same(communicator: Communicator) -> None:
        data = torch.ones(8)
        if communicator.rank == 0:
            communicator.all_reduce(data, name="gradient")
        else:
            communicator.all_reduce(data, name="gradient")

    def other(communicator: Communicator) -> None:
        communicator.barrier(name=f"of rank {communicator.rank}")

    assert run_pair(same, consensus="site-error") == [None, None]
    places = ("at name 'of rank 0'", "at name 'of rank 1'")
    said = [str(error) for error in run_pair(other, consensus="site-error")]
    assert all(own in text for own, text in zip(places, said, strict=True)), said
    # The position of the other rank is left out if it does not arrive within 500 ms.
    timely(
        lambda: all(place in text for place in places for text in said),
        f"both ranks know the names of both: {said}",
        within_s=0,
    )


def test_calls_with_a_root_and_between_two_ranks_have_no_site() -> None:
    def body(communicator: Communicator) -> None:
        data = torch.ones(8)
        if communicator.rank == 0:
            communicator.broadcast(data, 0)
            communicator.gather(data, 1)
            communicator.send(data, 1)
        else:
            communicator.broadcast(data, 0)
            communicator.gather(data, 1)
            communicator.recv(data, 0)
        communicator.barrier()

    assert run_pair(body, consensus="site-error") == [None, None]


def test_every_call_of_all_ranks_has_a_site() -> None:
    calls: dict[str, Callable[[Communicator, str], object]] = {
        "all_reduce": lambda c, n: c.all_reduce(torch.ones(4), name=n),
        "all_gather": lambda c, n: c.all_gather(torch.ones(4), name=n),
        "all_gatherv": lambda c, n: c.all_gatherv(torch.ones(2, 2), [2, 2], name=n),
        "reduce_scatter": lambda c, n: c.reduce_scatter(torch.ones(4), name=n),
        "reduce_scatterv": lambda c, n: c.reduce_scatterv(torch.ones(4), [2, 2], name=n),
        "all_to_all": lambda c, n: c.all_to_all(torch.ones(4), name=n),
        "all_to_allv": lambda c, n: c.all_to_allv(torch.ones(4), [2, 2], [2, 2], name=n),
        "barrier": lambda c, n: c.barrier(name=n),
    }
    for name, call in calls.items():
        errors = run_pair(lambda c, call=call: call(c, str(c.rank)), consensus="site-error")  # type: ignore[misc]
        assert all(errors), name


def test_another_site_is_logged_and_the_results_arrive(caplog: pytest.LogCaptureFixture) -> None:
    def body(communicator: Communicator) -> None:
        data = torch.ones(8)
        for _ in range(30):
            total = communicator.all_reduce(data, name=f"of rank {communicator.rank}")
            assert total[0] == 2

    with caplog.at_level(logging.WARNING, "r2serve.r2ccl"):
        assert run_pair(body, consensus="site") == [None, None]
    lines = [record.message for record in caplog.records if " is at name " in record.message]
    assert len(lines) == 40  # 20 of each rank
    assert "at name 'of rank 0'" in "".join(lines)


def test_off_compares_nothing_more() -> None:
    def body(communicator: Communicator) -> None:
        with communicator.step(communicator.rank + 1):
            communicator.all_reduce(torch.ones(8), name=str(communicator.rank))

    assert run_pair(body) == [None, None]


def test_a_step_out_of_range_is_refused() -> None:
    def body(communicator: Communicator) -> None:
        for number in (0, -1, 2**32):
            with pytest.raises(InvalidArgumentError, match=f"number: is {number}; must be from 1"):
                communicator.step(number)

    assert run_pair(body, consensus="step") == [None, None]


def test_an_about_that_is_cut_within_a_character_is_text(tmp_path: Path) -> None:
    def body(communicator: Communicator) -> None:
        with communicator.step(1, about="é" * 400):
            part_in_the_middle(communicator)

    texts = [str(error) for error in run_pair(body, consensus="step")]
    assert "rank 1 in" in texts[1]
    # The position of the other rank is left out if it does not arrive within 500 ms.
    timely(
        lambda: all("rank 1 in" in text for text in texts),
        f"both ranks know the position of rank 1: {texts}",
        within_s=0,
    )


def test_other_settings_on_a_rank_are_refused() -> None:
    port = free_port()
    texts = ["", ""]

    def run(rank: int) -> None:
        config = Config(
            rails="127.0.0.1",
            node="per-rank",
            consensus=("off", "step")[rank],
            connect_timeout_s=20.0,
        )
        with pytest.raises((ConfigError, R2cclError)) as caught:
            Communicator.standalone("127.0.0.1", port, rank, 2, config=config, share_engine=False)
        texts[rank] = str(caught.value)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    join_all(threads)
    assert all("consensus" in text for text in texts), texts


def test_names_of_each_call_take_limited_memory() -> None:
    """The newest names stay known, in the errors as well."""
    count = 3 * sites.MOST

    def body(communicator: Communicator) -> None:
        if communicator.rank == 0:
            for number in range(count):
                sites.mark(f"step {number}")
        communicator.barrier(name=f"step {count - communicator.rank}")

    said = [str(error) for error in run_pair(body, consensus="site-error")]
    assert f"at name 'step {count}'" in said[0]
    assert f"at name 'step {count - 1}'" in said[1]
    assert len(sites._named) <= sites.MOST


def test_generated_code_takes_limited_memory() -> None:
    for number in range(2 * sites.MOST):
        code = compile("mark(None)", f"/srv/made_{number}.py", "exec")
        exec(code, {"__name__": "made", "mark": sites.mark})
    assert len(sites._known) <= sites.MOST


@pytest.mark.parametrize(
    ("module", "file", "place"),
    [
        ("__main__", "/srv/a/train.py", "train.py:7"),
        ("package.module", "/srv/x/package/module.py", "package/module.py:7"),
    ],
)
def test_a_place_is_the_same_in_every_folder(module: str, file: str, place: str) -> None:
    assert sites.place(module, file, 7) == place
