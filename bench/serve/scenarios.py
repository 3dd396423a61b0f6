"""Schedules of faults: named scenarios, and files.

A line of a file is a fault::

    at: 12s, carrier_loss: rail0@node1, for: 8s

``at`` counts from the first request. Without ``for``, the fault stays until the end. Empty lines
and text after ``#`` are ignored. :data:`WORDS` has the kinds of faults; deprecated names are
accepted with a note. A fault strikes a rail of a node (``rail0@node1``), the busiest rail,
determined one second before (``used@node1``), all rails (``all@node1``), or the management NIC
(``mgmt@node1``). The management NIC carries the engine's own connections between the nodes.
"""

from __future__ import annotations

import math
import re

from r2serve.faults import canonical, note_on
from r2serve.lab.schedule import Aim, Fault, ScheduleError, check_apart

WORDS = (
    "carrier_loss",
    "black_hole",
    "peer_port_loss",
    "one_way_loss_from",
    "one_way_loss_to",
    "slow",
    "flap",
    "address_loss",
    "reset",
)
"""Kinds of faults accepted in a line, a subset of :data:`r2serve.lab.kinds.KINDS`."""

AIM_S = 1.0
"""The busiest rail is determined this time before a fault, in s."""

_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s)?")
_PLACE = re.compile(r"(?:rail(?P<rail>\d+)|(?P<which>used|all|mgmt))@node(?P<node>\d+)")


_AIMS = {"used": Aim.IN_USE, "all": Aim.ALL, "mgmt": Aim.MANAGEMENT}
_NAME_OF = {aim: name for name, aim in _AIMS.items()}


def line_of(fault: Fault) -> str:
    """Formats a fault as a line of a schedule."""
    where = f"rail{fault.rail}" if isinstance(fault.rail, int) else _NAME_OF[fault.rail]
    lasts = f", for: {fault.duration_s:g}s" if math.isfinite(fault.duration_s) else ""
    return f"at: {fault.at_s:g}s, {fault.kind}: {where}@node{fault.node}{lasts}"


def _twenty_faults() -> str:
    """Returns five faults four times, with 1.5 s between two; rails of both nodes take turns.

    Clients reach node 0 over its management NIC, so the one of node 1 is lost.
    """
    five = (
        ("carrier_loss", "rail0"),
        ("black_hole", "rail1"),
        ("carrier_loss", "mgmt"),
        ("reset", "rail0"),
        ("one_way_loss_to", "rail1"),
    )
    return "\n".join(
        f"at: {3 * turn + 3}s, {kind}: {where}@node{1 if where == 'mgmt' else turn % 2}, for: 1.5s"
        for turn, (kind, where) in enumerate(4 * five)
    )


SCENARIOS = {
    "healthy": "",
    "carrier-loss": "at: 4s, carrier_loss: used@node1, for: 8s",
    "black-hole": "at: 4s, black_hole: used@node1, for: 8s",
    "peer-port-loss": "at: 4s, peer_port_loss: used@node1, for: 8s",
    "flap-8s": "at: 4s, flap: used@node1, for: 8s",
    "slow": "at: 4s, slow: used@node1, for: 8s",
    "two-faults": "at: 3s, carrier_loss: rail0@node0, for: 4s\n"
    "at: 9s, black_hole: rail1@node1, for: 4s",
    "all-rails-8s": "at: 4s, carrier_loss: all@node1, for: 8s",
    "mgmt-carrier-loss": "at: 4s, carrier_loss: mgmt@node1, for: 6s",
    "mgmt-gone": "at: 4s, carrier_loss: mgmt@node1",
    "mgmt-black-hole": "at: 4s, black_hole: mgmt@node1, for: 8s",
    "mgmt-flap": "at: 4s, flap: mgmt@node1, for: 8s",
    "mgmt-reset": "at: 4s, reset: mgmt@node1, for: 1s\nat: 7s, address_loss: mgmt@node1, for: 4s",
    "mgmt-then-rail": "at: 4s, carrier_loss: mgmt@node1\nat: 7s, carrier_loss: used@node0, for: 4s",
    "healthy-on-rail0": "",
    "mgmt-is-rail0": "at: 4s, carrier_loss: rail0@node1",
    "twenty-faults": _twenty_faults(),
    "permanent": "at: 0s, carrier_loss: rail0@node1",
}

MANAGEMENT_RAIL = {"healthy-on-rail0": 0, "mgmt-is-rail0": 0}
"""Scenarios on nodes without a management NIC: control traffic uses the address of this rail."""

_OLD_NAMES = {
    "carrier": "carrier-loss",
    "blackhole": "black-hole",
    "peer-port": "peer-port-loss",
    "mgmt-nic": "mgmt-carrier-loss",
}


def named(name: str) -> str:
    """Returns the scenario for a deprecated name; returns any other name unchanged."""
    return _OLD_NAMES.get(name, name)


def scenario(name: str) -> tuple[Fault, ...]:
    """Returns the faults of a scenario. Raises ScheduleError for an unknown name."""
    if name not in SCENARIOS:
        raise ScheduleError(f"scenario is {name!r}: must be one of {', '.join(SCENARIOS)}")
    return parse(SCENARIOS[name])


def parse(text: str, nodes: int = 2, rails: int = 2) -> tuple[Fault, ...]:
    """Parses a schedule; returns the faults in order of time.

    Raises:
        ScheduleError: a line is malformed, or two faults overlap.
    """
    faults = []
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.partition("#")[0].strip()
        if bare:
            faults.append(_parse_line(number, bare, nodes, rails))
    faults.sort(key=lambda fault: fault.at_s)
    check_apart(faults, AIM_S, line_of)
    return tuple(faults)


def notes_on(text: str) -> list[str]:
    """Returns a note for each deprecated name in a schedule; several lines share a note."""
    parts = (part for line in text.splitlines() for part in line.partition("#")[0].split(","))
    notes = [note_on(part.partition(":")[0].strip()) for part in parts]
    return list(dict.fromkeys(note for note in notes if note))


def _parse_line(number: int, line: str, nodes: int, rails: int) -> Fault:
    def wrong(field: str, value: str, wanted: str) -> ScheduleError:
        return ScheduleError(f"line {number}: {field} is {value!r}: must be {wanted}")

    fields: dict[str, str] = {}
    for part in line.split(","):
        name, _, value = part.partition(":")
        if name.strip() in fields:
            raise wrong(name.strip(), part.strip(), "given once")
        fields[name.strip()] = value.strip()
    words = [name for name in fields if name not in ("at", "for")]
    if len(words) != 1 or canonical(words[0]) not in WORDS:
        raise wrong("the fault", ", ".join(words), f"one of {', '.join(WORDS)}")
    if "at" not in fields:
        raise wrong("at", "", "a time such as `12s`")
    word = words[0]
    place = _PLACE.fullmatch(fields[word])
    if place is None:
        raise wrong(word, fields[word], "a place such as rail0@node1, used@node1 or mgmt@node1")
    node = int(place["node"])
    if node >= nodes or int(place["rail"] or 0) >= rails:
        raise wrong(word, fields[word], f"of {nodes} nodes with {rails} rails, counted from 0")

    def seconds(name: str) -> float:
        found = _TIME.fullmatch(fields[name])
        if found is None:
            raise wrong(name, fields[name], "a time such as `12s` or `500ms`")
        return float(found[1]) / (1000 if found[2] == "ms" else 1)

    lasts = seconds("for") if "for" in fields else math.inf
    if lasts == 0:
        raise wrong("for", fields["for"], "above 0")
    rail = _AIMS[place["which"]] if place["which"] else int(place["rail"])
    return Fault(seconds("at"), canonical(word), node, rail, lasts)
