"""Replayed traffic of a served model. vLLM itself takes many minutes to start in the guest."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rails import rails

if TYPE_CHECKING:
    from ranks import Job

# Calls of vLLM in a decode step of the demo's model (4 layers, hidden size 256, vocabulary of
# 1024), on two ranks with 8 requests: an all-reduce for the embedding, two all-reduces per layer,
# and an all-gather of the logits.
DECODE = {"elements": 8 * 256, "repeats": 9, "gathered": 8 * 512}
PREFILL = {"elements": 85 * 256, "repeats": 9, "gathered": 8 * 512}


def test_no_token_is_lost_when_rails_are_cut_in_the_middle_of_decoding(
    job: Job, show: Callable[[str], None]
) -> None:
    before = job.carried()
    with job.stream(**PREFILL) as prefill:
        prefill.more(2)
    with job.stream(**DECODE) as decode:
        decode.more(20)
        for breaks, heals in (("down", "up"), ("unplug", "plug"), ("mute", "unmute")):
            for nic in ("n0r0", "n1r1"):
                rails(breaks, nic)
                decode.more(10)
                rails(heals, nic)
            decode.more(10)
    assert sum(job.carried().values()) > sum(before.values()) + len(decode.took) * 9 * 8 * 1024
    show(
        f"decoding 8 requests, {len(decode.took)} steps, 6 faults: a step takes "
        f"{decode.median:.0f} ms, the longest {decode.longest():.0f} ms; none lost, none wrong"
    )
    job.await_up()
