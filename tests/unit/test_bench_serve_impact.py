"""`r2serve bench serve`: the cost of faults, reported by the sidecar and seen by clients."""

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


# ---- rounds ----


def test_tokens_that_come_together_are_a_round() -> None:
    first = request(10, 20, 30, 40)
    second = request(31.5, 41, sent_ms=15)
    later = request(108, 118, sent_ms=100)
    found = rounds.rounds(Run((first, second, request(sent_ms=200), later)))
    assert [each.came_ns // 1_000_000 for each in found] == [10, 20, 30, 40, 108, 118]
    assert [each.took_ns // 1_000_000 for each in found] == [10, 10, 10, 10, 8, 10]
    idle = (True, True)
    assert [each.kind for each in found] == [idle, DECODE, FIRST, DECODE, idle, DECODE]


def test_several_tokens_at_once_count_as_several_steps() -> None:
    found = rounds.rounds(Run((request(10, 20, 50, 50.5, 51), request(10, 20, 50, 51))))
    assert [each.steps for each in found] == [1, 1, 3]
    late = rounds.RoundBaseline(found, (), ()).late_ns(2)  # a decode step takes 10 ms
    assert late == pytest.approx(0)


def test_tokens_arriving_with_a_first_token_count_as_decode() -> None:
    """A prompt takes 40 ms, any other token 10 ms."""
    long = request(10, 20, 30, 70, 80, 90, 130, 140, 150, 190, 200, 250, 250)
    others = [request(70 + 60 * place, sent_ms=35 + 60 * place) for place in range(3)]
    both = request(250, 250, sent_ms=205)
    found = rounds.rounds(Run((long, *others, both)))
    usual = rounds.RoundBaseline(found, (), ())
    assert (found[-1].kind, found[-1].steps) == (FIRST, 2)
    assert usual.ns(len(found) - 1) == pytest.approx(50e6)


def test_the_baseline_comes_from_nearby_rounds_of_the_same_kind() -> None:
    """Rounds of another batch, without a batch, or with a stall are left out of the baseline."""
    long = every(10, 20) + every(40, 20, since_ms=200)
    other = [240 + 40 * place + 15 for place in range(3)]  # the first token takes longer
    run = Run((request(*long), request(*other, sent_ms=200)))
    found = rounds.rounds(run)
    usual = rounds.RoundBaseline(found, {35}, [])
    assert usual.ns(5) == pytest.approx(10e6)
    assert usual.ns(len(found) - 1) == pytest.approx(40e6)
    assert usual.ns(0) == 0  # the only round of its kind
    own = rounds.RoundBaseline(found, (), [rounds.Round(0, 7_000_000, (True, True))])
    assert own.ns(0) == 7e6


def test_jitter_is_the_deviation_of_one_round_in_twenty() -> None:
    steady = request(*every(10, 40))
    assert rounds.jitter_ms(Run((steady,))) == 0
    times = every(10, 40)
    late = request(*times[:20], *(time + 30 for time in times[20:]))
    assert rounds.jitter_ms(Run((late,))) == 0  # a single late round of 40
    unsteady = request(*itertools.accumulate([10, 10, 10, 30] * 10))
    assert rounds.jitter_ms(Run((unsteady,))) == pytest.approx(20)
    assert rounds.jitter_ms(Run((request(1),))) is None


# ---- the sidecar's report ----


def test_a_client_sees_the_delay_of_a_stalled_step() -> None:
    late = request(*every(10, 10), *every(10, 10, since_ms=300), name="cmpl-1")
    early = request(*every(10, 10), name="cmpl-2")
    found = compared({"cmpl-1": waited(200.0, (102, 308))}, late, early)
    assert [(index, each.sidecar_ms) for index, each in found.items()] == [(0, 200.0)]
    assert found[0].client_ms == pytest.approx(200)
    assert found[0].agrees


def test_rounds_with_a_stall_of_another_request_are_no_baseline() -> None:
    late = request(10, 20, 150, 260, name="cmpl-1")
    other = request(10, 20, 150, 260, name="cmpl-2")
    held = {"cmpl-1": waited(120.0, (22, 148)), "cmpl-2": waited(100.0, (152, 258))}
    found = compared(held, late, other)
    assert (found[0].client_ms, found[1].client_ms) == pytest.approx((120, 100))


def test_a_token_in_transit_at_the_begin_of_a_stall_is_late_too() -> None:
    late = request(10, 20, 56, 60, 70, 80, name="cmpl-1")  # the token at 56 ms was made at 29 ms
    assert compared({"cmpl-1": waited(20.0, (30, 58))}, late)[0].client_ms == pytest.approx(20)
    # The token at 56 ms was in transit when the stall began at 53 ms, so its delay is no stall.
    assert compared({"cmpl-1": waited(4.0, (53, 59))}, late)[0].client_ms == 0
    # The token at 56 ms follows the end of the stall at 54 ms, and the token at 60 ms catches up.
    assert compared({"cmpl-1": waited(2.0, (52, 54))}, late)[0].client_ms == pytest.approx(20)


def test_a_delay_in_transit_after_a_stall_is_not_charged_to_the_stall() -> None:
    """A step stalls for 20 ms; its token is 10 ms later, and the next token follows at once."""
    times = [*every(10, 10), 140, 144, *every(10, 5, since_ms=144)]
    late = request(*times, name="cmpl-1")
    found = compared({"cmpl-1": waited(20.0, (101, 112))}, late)
    assert found[0].client_ms == pytest.approx(140 - 110 - 6)


def test_tokens_of_one_step_may_arrive_apart_after_a_stall() -> None:
    one = request(*every(10, 10), *every(10, 10, since_ms=130), name="cmpl-1")
    other = request(*every(10, 10), 144, *every(10, 9, since_ms=140), name="cmpl-2")
    found = compared({"cmpl-1": waited(30.0, (101, 139))}, one, other)
    assert found[0].client_ms == pytest.approx(30)


def test_requests_with_unknown_stalls_are_only_counted() -> None:
    often = request(*every(10, 10), *every(10, 10, since_ms=300), name="cmpl-1")
    held = {"cmpl-1": impact.Held(900.0, ((int(102e6), int(308e6)),), whole=False)}
    assert compared(held, often) == {}
    assert impact.partly_known(held, Run((often, request(10)))) == 1


def test_a_request_arriving_during_a_stall_waits_only_for_its_end() -> None:
    before = request(*every(10, 10), *every(10, 10, since_ms=300), name="cmpl-1")
    first = request(*every(10, 5, since_ms=315), sent_ms=250, name="cmpl-2")
    held = {"cmpl-1": waited(200.0, (102, 308)), "cmpl-2": waited(58.0, (250, 308))}
    found = compared(held, before, first)
    assert found[0].client_ms == pytest.approx(200)
    assert found[1].client_ms == pytest.approx(60)  # until the other request's token at 310 ms


def test_tokens_sooner_than_the_baseline_are_not_late() -> None:
    early = request(*every(10, 10), 104, 114, 124, name="cmpl-1")
    found = compared({"cmpl-1": waited(0.5, (101, 102))}, early)
    assert found[0].client_ms == 0
    assert found[0].agrees


def test_the_undisturbed_run_is_the_baseline_without_similar_rounds() -> None:
    late = request(110, name="cmpl-1")
    assert compared({"cmpl-1": waited(99.0, (2, 109))}, late)[0].client_ms == pytest.approx(100)


@pytest.mark.parametrize(
    ("sidecar", "client", "agrees"),
    [(2, 6.9, True), (2, 7.1, False), (8000, 7650, True), (8000, 7500, False)],
)
def test_agreement_is_to_5_ms_or_5_percent(sidecar: float, client: float, agrees: bool) -> None:
    assert impact.Impact(0, sidecar, client).agrees is agrees


def test_a_sidecar_that_does_not_start_is_an_error(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(impact, "_SIDECAR", "raise SystemExit('no sidecar today')")
    with pytest.raises(impact.ImpactError, match="no sidecar today"):
        impact.ask(tmp_path, tmp_path / "log")


def test_a_sidecar_without_requests_returns_none(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    assert impact.ask(tmp_path, tmp_path / "log") == {}
