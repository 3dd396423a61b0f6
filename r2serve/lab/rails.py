"""Rails of a lab: the index in a name, the rails in use between two readings, and waits."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping

IN_USE_SHARE = 0.05
_NAME = re.compile(r"rail(\d+)(?:@node\d+)?")


def rail_index(name: str) -> int:
    """Returns i of a rail's name ``rail<i>@node<j>``, or of a device's name ``rail<i>``.

    Raises:
        ValueError: the name has another form.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"name: {name!r} must be rail<i>@node<j> or rail<i>")
    return int(match[1])


def rails_in_use(before: Mapping[int, int], after: Mapping[int, int]) -> list[int]:
    """Returns the rails in use between two readings of bytes sent, in order.

    A rail is in use if it carried more than IN_USE_SHARE of the bytes of the busiest rail.
    """
    sent = _sent(before, after)
    least = IN_USE_SHARE * max(sent.values(), default=0)
    return [rail for rail, count in sorted(sent.items()) if count > least]


def busiest_rail(before: Mapping[int, int], after: Mapping[int, int]) -> tuple[int, int] | None:
    """Returns the busiest rail between two readings and the bytes; None without traffic."""
    sent = _sent(before, after)
    rail = max(sent, key=lambda key: sent[key], default=None)
    if rail is None or sent[rail] <= 0:
        return None
    return rail, sent[rail]


def _sent(before: Mapping[int, int], after: Mapping[int, int]) -> dict[int, int]:
    """Returns the bytes sent between two readings; a rail without a first reading began with 0."""
    return {rail: count - before.get(rail, 0) for rail, count in after.items()}


def wait_until(right: Callable[[], bool], within_s: float, every_s: float) -> bool:
    """Waits for a condition on rails; returns False after ``within_s`` s.

    Args:
        right: reads the rails; called at once, and then every ``every_s`` s.
    """
    deadline = time.monotonic() + within_s
    while not right():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True
