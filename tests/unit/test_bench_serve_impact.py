"""``r2serve bench serve``: what the sidecar says that faults cost, beside what clients saw."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from r2serve.bench.serve import impact, rounds
from r2serve.bench.serve.impact import Impact
from r2serve.lab.serving.client import Request, Run

DECODE, FIRST = (False, False), (True, False)


def request(*times_ms: float, sent_ms: float = 0, name: str = "") -> Request:
    times = tuple(int(time * 1e6) + 1 for time in times_ms)
    tokens = tuple(range(len(times)))
    return Request(tokens, times, "", True, sent_ns=int(sent_ms * 1e6) + 1, id=name)


def every(step_ms: float, many: int, since_ms: float = 0) -> list[float]:
    return [since_ms + step_ms * (number + 1) for number in range(many)]


def waited(total_ms: float, *spans_ms: tuple[float, float]) -> impact.Held:
    return impact.Held(
        total_ms, tuple((int(began * 1e6), int(ended * 1e6)) for began, ended in spans_ms)
    )


def compared(
    held: dict[str, impact.Held], *requests: Request, undisturbed: Request | None = None
) -> dict[int, Impact]:
    reference = Run((undisturbed or request(*every(10, 20)),))
    return {each.request: each for each in impact.compare(held, Run(requests), reference)}


# --- rounds ---------------------------------------------------------------------------------------


def test_tokens_that_come_together_are_a_round() -> None:
    first = request(10, 20, 30, 40)
    second = request(31.5, 41, sent_ms=15)
    later = request(108, 118, sent_ms=100)
    found = rounds.rounds(Run((first, second, request(sent_ms=200), later)))
    assert [each.came_ns // 1_000_000 for each in found] == [10, 20, 30, 40, 108, 118]
    assert [each.took_ns // 1_000_000 for each in found] == [10, 10, 10, 10, 8, 10]
    idle = (True, True)
    assert [each.kind for each in found] == [idle, DECODE, FIRST, DECODE, idle, DECODE]


def test_several_tokens_of_a_request_at_once_are_of_as_many_steps() -> None:
    found = rounds.rounds(Run((request(10, 20, 50, 50.5, 51), request(10, 20, 50, 51))))
    assert [each.steps for each in found] == [1, 1, 3]
    late = rounds.RoundBaseline(found, (), ()).late_ns(2)  # a decode takes 10 ms
    assert late == pytest.approx(0)


def test_of_a_first_token_that_comes_with_others_these_decode() -> None:
    """A prompt takes 40 ms, any other token 10."""
    long = request(10, 20, 30, 70, 80, 90, 130, 140, 150, 190, 200, 250, 250)
    others = [request(70 + 60 * place, sent_ms=35 + 60 * place) for place in range(3)]
    both = request(250, 250, sent_ms=205)
    found = rounds.rounds(Run((long, *others, both)))
    usual = rounds.RoundBaseline(found, (), ())
    assert (found[-1].kind, found[-1].steps) == (FIRST, 2)
    assert usual.ns(len(found) - 1) == pytest.approx(50e6)


def test_usual_is_what_rounds_of_the_same_kind_around_take() -> None:
    """Not those of another batch, or of no batch, or those that waited, too."""
    long = every(10, 20) + every(40, 20, since_ms=200)
    other = [240 + 40 * place + 15 for place in range(3)]  # its first token takes longer
    run = Run((request(*long), request(*other, sent_ms=200)))
    found = rounds.rounds(run)
    usual = rounds.RoundBaseline(found, {35}, [])
    assert usual.ns(5) == pytest.approx(10e6)
    assert usual.ns(len(found) - 1) == pytest.approx(40e6)
    assert usual.ns(0) == 0  # the only one of its kind
    own = rounds.RoundBaseline(found, (), [rounds.Round(0, 7_000_000, (True, True))])
    assert own.ns(0) == 7e6


def test_jitter_is_what_one_round_in_twenty_differs_by() -> None:
    steady = request(*every(10, 40))
    assert rounds.jitter_ms(Run((steady,))) == 0
    times = every(10, 40)
    late = request(*times[:20], *(time + 30 for time in times[20:]))
    assert rounds.jitter_ms(Run((late,))) == 0  # one of 40
    unsteady = request(*itertools.accumulate([10, 10, 10, 30] * 10))
    assert rounds.jitter_ms(Run((unsteady,))) == pytest.approx(20)
    assert rounds.jitter_ms(Run((request(1),))) is None


# --- the sidecar's word ---------------------------------------------------------------------------


def test_a_client_sees_what_came_late_of_a_step_that_waited() -> None:
    late = request(*every(10, 10), *every(10, 10, since_ms=300), name="cmpl-1")
    early = request(*every(10, 10), name="cmpl-2")
    found = compared({"cmpl-1-0": waited(200.0, (102, 308))}, late, early)
    assert [(index, each.sidecar_ms) for index, each in found.items()] == [(0, 200.0)]
    assert found[0].client_ms == pytest.approx(200)
    assert found[0].agrees


def test_rounds_with_a_wait_of_another_request_are_not_usual_either() -> None:
    late = request(10, 20, 150, 260, name="cmpl-1")
    other = request(10, 20, 150, 260, name="cmpl-2")
    held = {"cmpl-1": waited(120.0, (22, 148)), "cmpl-2": waited(100.0, (152, 258))}
    found = compared(held, late, other)
    assert (found[0].client_ms, found[1].client_ms) == pytest.approx((120, 100))


def test_a_token_that_was_on_its_way_when_the_wait_began_is_late_by_it_too() -> None:
    late = request(10, 20, 56, 60, 70, 80, name="cmpl-1")  # 56: made at 29
    assert compared({"cmpl-1": waited(20.0, (30, 58))}, late)[0].client_ms == pytest.approx(20)
    # The token at 56 came in time.
    assert compared({"cmpl-1": waited(4.0, (53, 59))}, late)[0].client_ms == 0
    # The next token came right after its end, and what was late before it came at once.
    assert compared({"cmpl-1": waited(2.0, (52, 54))}, late)[0].client_ms == pytest.approx(20)


def test_what_something_else_held_up_on_its_way_is_not_late_by_the_wait() -> None:
    """A step waited for 20 ms; its token came 10 ms later than that, and the next one at once."""
    times = [*every(10, 10), 140, 144, *every(10, 5, since_ms=144)]
    late = request(*times, name="cmpl-1")
    found = compared({"cmpl-1": waited(20.0, (101, 112))}, late)
    assert found[0].client_ms == pytest.approx(140 - 110 - 6)


def test_tokens_of_one_step_that_come_apart_are_not_what_was_held_up_before() -> None:
    one = request(*every(10, 10), *every(10, 10, since_ms=130), name="cmpl-1")
    other = request(*every(10, 10), 144, *every(10, 9, since_ms=140), name="cmpl-2")
    found = compared({"cmpl-1": waited(30.0, (101, 139))}, one, other)
    assert found[0].client_ms == pytest.approx(30)


def test_requests_of_which_not_all_waits_are_known_are_counted_only() -> None:
    often = request(*every(10, 10), *every(10, 10, since_ms=300), name="cmpl-1")
    held = {"cmpl-1": impact.Held(900.0, ((int(102e6), int(308e6)),), whole=False)}
    assert compared(held, often) == {}
    assert impact.partly_known(held, Run((often, request(10)))) == 1


def test_who_arrives_meanwhile_waits_for_the_end_only() -> None:
    before = request(*every(10, 10), *every(10, 10, since_ms=300), name="cmpl-1")
    first = request(*every(10, 5, since_ms=315), sent_ms=250, name="cmpl-2")
    held = {"cmpl-1": waited(200.0, (102, 308)), "cmpl-2": waited(58.0, (250, 308))}
    found = compared(held, before, first)
    assert found[0].client_ms == pytest.approx(200)
    assert found[1].client_ms == pytest.approx(60)  # when the others' token came


def test_what_came_sooner_than_usual_is_not_late() -> None:
    early = request(*every(10, 10), 104, 114, 124, name="cmpl-1")
    found = compared({"cmpl-1": waited(0.5, (101, 102))}, early)
    assert found[0].client_ms == 0
    assert found[0].agrees


def test_where_nothing_else_is_like_it_the_undisturbed_run_is() -> None:
    late = request(110, name="cmpl-1")
    assert compared({"cmpl-1": waited(99.0, (2, 109))}, late)[0].client_ms == pytest.approx(100)


@pytest.mark.parametrize(
    ("sidecar", "client", "agrees"),
    [(2, 6.9, True), (2, 7.1, False), (8000, 7650, True), (8000, 7500, False)],
)
def test_agreement_is_to_5_ms_or_5_percent(sidecar: float, client: float, agrees: bool) -> None:
    assert impact.Impact(0, sidecar, client).agrees is agrees


def test_a_sidecar_that_does_not_start_is_said(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(impact, "_SIDECAR", "raise SystemExit('no sidecar today')")
    with pytest.raises(impact.ImpactError, match="no sidecar today"):
        impact.ask(tmp_path, tmp_path / "log")


def test_a_sidecar_without_requests_has_none(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    assert impact.ask(tmp_path, tmp_path / "log") == {}
