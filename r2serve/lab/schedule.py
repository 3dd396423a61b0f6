"""Schedules of faults, and a seeded generator for a compressed hour of faults.

Only the times between faults are compressed (an hour into 5 minutes). Each fault itself, e.g.
flapping or the loss of all rails for 8 s, has real duration.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar

from r2serve.lab.kinds import KINDS

HOUR_S = 300.0
"""An hour, compressed 12:1."""

SHORTEST_S, LONGEST_S = 0.5, 20.0
"""Limits of a fault's duration, s; the upper limit is well below ``link_timeout_s``."""

LONGEST_OUTAGE_S = 10.0
"""Longest time without any rail, s."""

# Slots of a generated schedule, s. A slot has room for detection and rejoin.
_SLOT_S = 6.0
_FIRST_AT_S = 1.0
_OUTAGE_S = 8.0
# Shorter schedules leave the outage out, to keep time for the other faults.
_OUTAGE_NEEDS_S = 100.0


T = TypeVar("T")


class ScheduleError(ValueError):
    """The schedule is invalid; the text names the field."""


class Aim(Enum):
    """The target of a fault, resolved when the fault strikes."""

    IN_USE = "rail in use"
    IDLE = "idle rail"
    ALL = "all rails"
    MANAGEMENT = "management NIC"
    """The node's port of the management network: known beforehand, and not a rail."""


@dataclass(frozen=True)
class Fault:
    """A fault at node `node`.

    at_s: seconds since the start of the schedule. kind: a key of KINDS. rail: index or aim.
    duration_s: time until healed; infinite = never healed.
    """

    at_s: float
    kind: str
    node: int
    rail: int | Aim
    duration_s: float

    @property
    def end_s(self) -> float:
        return self.at_s + self.duration_s

    @property
    def is_exact(self) -> bool:
        """True if the port is known before the fault strikes."""
        return isinstance(self.rail, int) or self.rail is Aim.MANAGEMENT

    def takes(self, rail: int) -> bool:
        """Returns True if the fault certainly hits this rail."""
        return self.rail is Aim.ALL or self.rail == rail


@dataclass(frozen=True)
class Schedule:
    """Faults in time order, with the length in seconds and the number of nodes and rails.

    Raises:
        ScheduleError: a field is invalid, two faults would hit the same rail at once, or no rail
            would be left for more than LONGEST_OUTAGE_S.
    """

    faults: tuple[Fault, ...]
    seconds: float
    nodes: int = 2
    rails: int = 2

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ScheduleError(f"seconds is {self.seconds:g}: must be above 0")
        for index, fault in enumerate(self.faults):
            self._check_fault(index, fault)
        for (i, first), (j, second) in itertools.combinations(enumerate(self.faults), 2):
            if second.at_s < first.at_s:
                raise ScheduleError(f"faults[{j}].at_s is {second.at_s:g}: before faults[{i}]")
            if second.at_s < first.end_s:
                self._check_overlap(i, first, j, second)
        self._check_outages()

    def _check_fault(self, index: int, fault: Fault) -> None:
        def check(field: str, right: bool, wanted: str) -> None:
            if not right:
                value = getattr(fault, field)
                raise ScheduleError(f"faults[{index}].{field} is {value!r}: must be {wanted}")

        check("kind", fault.kind in KINDS, f"one of {', '.join(KINDS)}")
        check("node", 0 <= fault.node < self.nodes, f"0 to {self.nodes - 1}")
        if isinstance(fault.rail, int):
            check("rail", 0 <= fault.rail < self.rails, f"0 to {self.rails - 1} or an aim")
        check("at_s", fault.at_s >= 0, "0 or more")
        right = SHORTEST_S <= fault.duration_s <= LONGEST_S
        check("duration_s", right, f"{SHORTEST_S:g} to {LONGEST_S:g} s")
        check("duration_s", fault.end_s <= self.seconds, f"over by the end, {self.seconds:g} s")

    def _check_overlap(self, i: int, first: Fault, j: int, second: Fault) -> None:
        if not (first.is_exact and second.is_exact):
            raise ScheduleError(
                f"faults[{j}].at_s is {second.at_s:g}: within faults[{i}], and only faults of "
                "given rails and of the management NIC may overlap"
            )
        if first.rail == second.rail:
            raise ScheduleError(f"faults[{j}].rail is {second.rail}: already hit by faults[{i}]")

    def _check_outages(self) -> None:
        times = sorted({t for fault in self.faults for t in (fault.at_s, fault.end_s)})
        began: float | None = None
        for begin, end in itertools.pairwise(times):
            lasting = [fault for fault in self.faults if fault.at_s <= begin < fault.end_s]
            lost = {rail for rail in range(self.rails) if any(f.takes(rail) for f in lasting)}
            if len(lost) < self.rails:
                began = None
                continue
            began = begin if began is None else began
            if end - began > LONGEST_OUTAGE_S:
                which = max(i for i, fault in enumerate(self.faults) if fault in lasting)
                raise ScheduleError(
                    f"faults[{which}].duration_s is {self.faults[which].duration_s:g}: no rail "
                    f"would be left for more than {LONGEST_OUTAGE_S:g} s"
                )

    def label(self, index: int) -> str:
        """Returns the label of a fault; see :func:`label_of`."""
        return label_of(self.faults, index)


def is_second(faults: Sequence[Fault], index: int) -> bool:
    """Returns True if the fault strikes during an earlier fault."""
    at_s = faults[index].at_s
    return any(fault.end_s > at_s for fault in faults[:index])


def label_of(faults: Sequence[Fault], index: int) -> str:
    """Returns the kind of a fault, with a note for second faults and special aims."""
    fault = faults[index]
    notes = [fault.kind]
    if fault.rail in (Aim.IDLE, Aim.ALL, Aim.MANAGEMENT):
        notes.append(fault.rail.value)
    if is_second(faults, index):
        notes.append("second fault")
    return ", ".join(notes)


def check_apart(faults: Sequence[Fault], ahead_s: float, text_of: Callable[[Fault], str]) -> None:
    """Checks a time-ordered list of faults for two faults on the same rail at once.

    ahead_s: lead time for choosing the rail in use, s; no fault may be active during this time.

    Raises:
        ScheduleError: two faults overlap or are too close.
    """
    for earlier, later in itertools.pairwise(faults):
        same_port = (earlier.rail, earlier.node) == (later.rail, later.node)
        vague = any(isinstance(fault.rail, Aim) for fault in (earlier, later))
        both_rails = Aim.MANAGEMENT not in (earlier.rail, later.rail)
        if later.at_s < earlier.end_s and (same_port or (vague and both_rails)):
            raise ScheduleError(
                f"`{text_of(later)}` begins before `{text_of(earlier)}` ends, on the same rail"
            )
        if later.rail is Aim.IN_USE and both_rails and later.at_s - ahead_s < earlier.end_s:
            raise ScheduleError(
                f"`{text_of(later)}` begins less than {ahead_s:g} s after the end of "
                f"`{text_of(earlier)}`: the busiest rail is determined this long before a fault"
            )


def compressed_hour(seed: int, seconds: float = HOUR_S, nodes: int = 2, rails: int = 2) -> Schedule:
    """Returns the first `seconds` s of a compressed hour; equal seeds give equal schedules.

    Kinds and ports alternate, with seeded jitter. Some faults strike during an earlier fault, some
    strike an idle rail or the management NIC, and a single fault takes all rails for 8 s.

    Raises:
        ScheduleError: `seconds` is too short for a fault, or `rails` is below 2.
    """
    if rails < 2:
        raise ScheduleError(f"rails is {rails}: must be 2 or more")
    source = random.Random(seed)
    slots = int((seconds - _FIRST_AT_S) // _SLOT_S)
    if slots < 1:
        raise ScheduleError(f"seconds is {seconds:g}: must be {_FIRST_AT_S + _SLOT_S:g} or more")
    # An outage takes two slots.
    outage = int(slots * 0.6) if seconds >= _OUTAGE_NEEDS_S else slots
    scenes = _scenes(_in_turn(source, KINDS))
    # Each aim has a rotation of its own, so that rare aims reach every node, too.
    struck = {aim: _in_turn(source, range(nodes)) for aim in Aim}
    ports = _in_turn(source, itertools.product(range(nodes), range(rails)))
    faults: list[Fault] = []
    for slot in range(slots):
        at_s = _FIRST_AT_S + slot * _SLOT_S + source.uniform(0, 1)
        if slot == outage:
            faults.append(Fault(at_s, "carrier_loss", next(struck[Aim.ALL]), Aim.ALL, _OUTAGE_S))
        elif slot != outage + 1:
            faults += _play(next(scenes), source, struck, ports, at_s)
    rounded = [
        replace(fault, at_s=round(fault.at_s, 2), duration_s=round(fault.duration_s, 2))
        for fault in faults
    ]
    return Schedule(tuple(rounded), seconds, nodes, rails)


@dataclass(frozen=True)
class _Scene:
    """The faults of a slot.

    aim: None = the next port of the rotation. second: a second fault, at the next port.
    """

    kind: str
    aim: Aim | None = None
    second: str | None = None


def _in_turn(source: random.Random, things: Iterable[T]) -> Iterator[T]:
    """Yields all things in endless shuffled rounds."""
    every = list(things)
    while True:
        yield from source.sample(every, len(every))


def _scenes(at_management: Iterator[str]) -> Iterator[_Scene]:
    """Yields the scenes. at_management: kinds of single faults at the management NIC."""
    kinds = list(KINDS)
    steady = [name for name, kind in KINDS.items() if kind.cycle_s is None and kind.leaves_up]
    for turn in itertools.count():
        # Rounds alternate between the rail in use and a rotation over all ports, busy or idle.
        aim = None if turn % 2 else Aim.IN_USE
        first, second, third = (steady[(turn + i) % len(steady)] for i in range(3))
        round_of = [_Scene(kind, aim) for kind in kinds]
        round_of.insert(2, _Scene(first, second=second))
        round_of.insert(3, _Scene(next(at_management), Aim.MANAGEMENT))
        round_of.insert(8, _Scene(second, second=third))
        round_of.insert(9, _Scene(third, Aim.MANAGEMENT, second=first))
        round_of.insert(13, _Scene(next(at_management), Aim.MANAGEMENT))
        round_of.append(_Scene(second, Aim.IDLE))
        yield from round_of


def _play(
    scene: _Scene,
    source: random.Random,
    nodes: Mapping[Aim, Iterator[int]],
    ports: Iterator[tuple[int, int]],
    at_s: float,
) -> list[Fault]:
    port: tuple[int, int | Aim]
    port = next(ports) if scene.aim is None else (next(nodes[scene.aim]), scene.aim)
    node, rail = port
    if scene.second is None:
        return [Fault(at_s, scene.kind, node, rail, source.uniform(1.5, 3.0))]
    other = next(port for port in ports if port[1] != rail)
    return [
        Fault(at_s, scene.kind, node, rail, source.uniform(2.5, 3.0)),
        Fault(at_s + 1.0, scene.second, *other, source.uniform(2.0, 2.5)),
    ]
