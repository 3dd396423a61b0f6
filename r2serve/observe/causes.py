"""Selects the rail events that may have stalled a request."""

from __future__ import annotations

from itertools import takewhile

from r2serve.observe.impact import TrackedRequest
from r2serve.observe.watch import NumberedEvent, Watch

CAUSE_NS = 1_000_000_000
"""Rail events up to this time before a stall count as possible causes, ns."""
MAX_CAUSES = 200
_CAUSES = ("rail_state", "verdict", "speed", "injected", "stall")


def causes_of(request: TrackedRequest, watch: Watch) -> list[NumberedEvent]:
    """Returns the rail events that may have stalled a request, oldest first, at most MAX_CAUSES.

    The events lie between ``CAUSE_NS`` before the first stall and the end of the last stalled
    step. If no rail was lost or suspected in this period, the last earlier loss is included.
    """
    stalls = [stall for held in request.steps for stall in held.stalls]
    if not stalls:
        return []
    first_ns = min(stall.began_clock_ns for stall in stalls) - CAUSE_NS
    last_ns = max(held.ended_clock_ns for held in request.steps)
    told = [
        one
        for one in takewhile(lambda one: one.clock_ns >= first_ns, reversed(watch.events))
        if one.clock_ns <= last_ns and one.event.kind in _CAUSES
    ]
    if not any(_is_loss(one) or _is_suspicion(one) for one in told):
        before = (one for one in reversed(watch.events) if one.clock_ns < first_ns)
        lost = next((one for one in before if _is_loss(one)), None)
        if lost is not None:
            told.append(lost)
    return told[:MAX_CAUSES][::-1]


def _is_loss(told: NumberedEvent) -> bool:
    return told.event.kind == "rail_state" and told.event.value == 1


def _is_suspicion(told: NumberedEvent) -> bool:
    return told.event.kind == "rail_state" and told.event.text.startswith("UP->SUSPECT")
