"""The sidecar's log of the node's health: a line per fault, not per end of a rail."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from r2serve.observe.health import FAILING, NO_ENGINE, Health
from r2serve.observe.reasons import Reason

_LOG = logging.getLogger("r2serve.sidecar")

SETTLE_S = 1.0
"""A fault is told after this time, s: all workers have then noticed it, and links are counted."""
GONE_S = 10.0
"""A fault is over after this time without it, s: a flapping rail has one line, not one per flap."""
REMIND_S = 3600.0
"""A lasting fault is told again after this time, s."""


@dataclass
class _Told:
    """A fault that is there, or was until a moment ago."""

    reason: Reason
    since_s: float
    seen_s: float
    status: str
    """Status of the health that had the fault last."""
    told_s: float | None = None
    """Time of the last line; None: not told yet."""
    names: set[str] = field(default_factory=set)
    """Peers or workers that a line has told of."""


class HealthLog:
    """Logs when a fault begins, reaches another peer, lasts for another hour, or ends."""

    def __init__(self) -> None:
        self._faults: dict[str, _Told] = {}

    def take(self, health: Health, now_s: float) -> None:
        """Compares the health with the previous one. now_s: any clock that never goes back."""
        if health.status == NO_ENGINE:
            self._faults.clear()  # an engine that ended has no more faults, and repaired none
            return
        for reason in health.details:
            fault = self._faults.setdefault(
                reason.about, _Told(reason, now_s, now_s, health.status)
            )
            fault.reason, fault.seen_s, fault.status = reason, now_s, health.status
            if fault.told_s is None:
                if now_s - fault.since_s >= SETTLE_S:
                    self._say(fault, "%s", now_s)
            elif now_s - fault.told_s >= REMIND_S:
                self._say(fault, "still: %s", now_s)
            elif not fault.names.issuperset(reason.names) and now_s - fault.told_s >= SETTLE_S:
                self._say(fault, "more: %s", now_s)
        if health.status == FAILING:
            self._keep_hidden(now_s)
        over = [one for one in self._faults.values() if now_s - one.seen_s >= GONE_S]
        for fault in over:
            del self._faults[fault.reason.about]
            if fault.told_s is not None:
                _LOG.warning("over: %s", fault.reason.about)

    def _keep_hidden(self, now_s: float) -> None:
        """Keeps the faults of single ports, which a node that fails does not name."""
        for fault in self._faults.values():
            if fault.status != FAILING:
                fault.seen_s = now_s

    def _say(self, fault: _Told, line: str, now_s: float) -> None:
        _LOG.warning(line, fault.reason.text)
        fault.told_s = now_s
        fault.names.update(fault.reason.names)
