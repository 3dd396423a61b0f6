"""What a node says at start about its rails: ports, ports left out, and shared hardware."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from r2serve.ports.choice import Choice, LeftOut, Port
from r2serve.ports.later import NOTHING
from r2serve.ports.units import natural

logger = logging.getLogger(__name__)

_MOST_NAMED = 16
"""Interfaces of a log line."""


def tell(choice: Choice) -> None:
    """Logs the rails, the interfaces left out, and shared hardware."""
    for text in choice.warnings:
        logger.warning("%s", text)
    logger.info(
        "rails: %s; not used: %s",
        ", ".join(describe(port) for port in choice.ports) or "none",
        ", ".join(not_used(choice)) or "none",
    )
    for each in choice.left_out:
        if each.faster:
            logger.warning("%s", faster(each))
    for port in choice.later:
        level = logging.INFO if port.waits == NOTHING else logging.WARNING
        logger.log(
            level, "%s is no rail yet: %s; it joins once it is ready", port.device, port.waits
        )
    for port in choice.ports:
        if port.fading:
            logger.warning(
                "rail port %s uses %s, a %s address: the rail moves once the address goes away",
                port.device,
                port.address,
                port.fading,
            )
        if not port.carrier and not port.waits:
            logger.warning(
                "rail port %s (%s) is down; traffic uses the rail once the port is up",
                port.device,
                port.address,
            )
    units = {port.unit.name for port in choice.ports}
    for text in shared_fate(choice.ports):
        logger.log(logging.WARNING if len(units) == 1 else logging.INFO, "%s", text)


def not_used(choice: Choice, without: Collection[str] = ()) -> list[str]:
    """Returns the interfaces that are no rails, with the reasons; a short list on any host.

    Args:
        without: devices that the text names elsewhere.
    """
    left_out = [each for each in choice.left_out if each.device not in without]
    if len(left_out) > _MOST_NAMED:  # interfaces that deserve a thought come first
        later = {port.device for port in choice.later}
        left_out.sort(key=lambda each: each.device not in later and not each.mbit_s)
    others = [f"{each.device} ({each.why}{_speed(each.mbit_s)})" for each in left_out]
    if len(others) > _MOST_NAMED:
        others[_MOST_NAMED:] = [f"and {len(others) - _MOST_NAMED} more"]
    return others


def describe(port: Port) -> str:
    """Returns device, address, speed and role of a port."""
    facts = ["no address so far" if port.waits else port.address]
    facts += [each.address for each in port.others]
    if port.mbit_s:
        facts.append(f"{port.mbit_s / 1000:g} Gbit/s")
    if port.shares_control:
        facts.append("also control traffic")
    if port.reserve:
        facts.append(f"reserve: {port.reserve}")
    return f"{port.device or 'any port'} ({', '.join(facts)})"


def faster(left: LeftOut) -> str:
    """Returns the warning about an interface left out although it is faster than a rail."""
    return (
        f"{left.device}{_speed(left.mbit_s)} is no rail, although it is faster than a port in use: "
        f"{left.why}"
    )


def shared_fate(ports: Sequence[Port]) -> list[str]:
    """Returns a sentence for each unit with several rails, and for cards with several units."""
    sentences = []
    by_unit: dict[str, list[Port]] = {}
    by_card: dict[str, set[str]] = {}
    for port in ports:
        if port.unit.name:
            by_unit.setdefault(port.unit.name, []).append(port)
        if port.unit.card:
            by_card.setdefault(port.unit.card, set()).add(port.device)
    for members in by_unit.values():
        if len(members) > 1:
            unit = members[0].unit
            why = unit.why or f"the physical port {unit.name}"
            names = " and ".join(port.device for port in members)
            sentences.append(f"{names} share {why}: one unit of redundancy")
    for card, devices in by_card.items():
        if len(devices) > 1:
            names = " and ".join(sorted(devices, key=natural))
            sentences.append(f"{names} have cables of their own, but share one card ({card})")
    return sentences


def _speed(mbit_s: int) -> str:
    return f", {mbit_s / 1000:g} Gbit/s" if mbit_s else ""
