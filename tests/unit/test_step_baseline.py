"""The baseline of a step's duration, from the steps before."""

from __future__ import annotations

import pytest

from r2serve.observe.step_baseline import USUAL_OF, StepBaseline


def seen(*steps: tuple[int, int]) -> StepBaseline:
    """Returns the baseline after steps of (tokens, ns), all with prefill."""
    usual = StepBaseline()
    for tokens, took_ns in steps:
        usual.note(took_ns, tokens, one_each=False)
    return usual


def test_the_decode_baseline_is_the_median_of_the_last_steps() -> None:
    usual = StepBaseline()
    for _ in range(USUAL_OF // 4):
        assert usual.ns(3, one_each=True) == 0  # too few steps
        usual.note(100, 3, one_each=True)
    assert usual.ns(5, one_each=True) == 100
    for took_ns in [200] * (USUAL_OF - 1) + [9000]:
        usual.note(took_ns, 3, one_each=True)
    assert usual.ns(3, one_each=True) == 200
    assert usual.ns(3, one_each=False) == 0  # there is no step with prefill


def test_the_prefill_baseline_is_a_robust_fit_over_tokens() -> None:
    usual = seen((10, 1100), (40, 1400), (20, 1200), (25, 90_000), (80, 1800))
    assert usual.ns(60, one_each=False) == 1600
    assert usual.ns(60, one_each=True) == 0


def test_the_prefill_baseline_of_equal_prompts_is_their_median() -> None:
    usual = seen((10, 1000), (10, 1100), (10, 1200), (10, 7000))
    assert usual.ns(12, one_each=False) == 1150


def test_the_prefill_baseline_never_decreases_with_tokens() -> None:
    usual = seen((10, 1300), (20, 1200), (30, 1100), (40, 1000))
    assert usual.ns(40, one_each=False) == usual.ns(10, one_each=False) == 1150


@pytest.mark.parametrize(("tokens", "known"), [(4, False), (5, True), (80, True), (81, False)])
def test_steps_of_unusual_size_have_no_baseline(tokens: int, known: bool) -> None:
    usual = seen((10, 1100), (20, 1200), (30, 1300), (40, 1400))
    assert (usual.ns(tokens, one_each=False) > 0) is known


def test_the_baseline_is_not_extrapolated() -> None:
    usual = seen((10, 1100), (20, 1200), (30, 1300), (40, 1400))
    assert [usual.ns(tokens, one_each=False) for tokens in (5, 10, 40, 80)] == [
        1100,
        1100,
        1400,
        1400,
    ]


def test_steps_with_an_unknown_number_of_tokens_are_ignored() -> None:
    usual = seen(*[(0, 1000)] * USUAL_OF)
    assert usual.ns(0, one_each=False) == 0
