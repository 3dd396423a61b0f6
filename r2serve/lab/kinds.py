"""Kinds of faults at a port of the lab, by name; the port of a rail, or the management port.

A new kind is an entry in :data:`KINDS`; schedules then include the kind automatically.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from r2serve.lab.faults import nic_name
from r2serve.lab.lab import Lab

Change = Callable[[Lab, int, int | None], object]


@dataclass(frozen=True)
class FaultMaker:
    """Makes and undoes a kind of fault; both functions take the lab, the node and the rail or None.

    cycle_s: None for a steady fault; else the on and off times of an intermittent fault, s.
    leaves_up: True if the rail must leave UP; False if the fault only degrades the rail, so workers
    need not react.
    """

    make: Change
    undo: Change
    cycle_s: tuple[float, float] | None = None
    leaves_up: bool = True


def _cut_cable(lab: Lab, node: int, rail: int | None) -> object:
    return lab.cut(node, rail)


def _set_port_down(lab: Lab, node: int, rail: int | None) -> object:
    return lab.cut(node, rail, at_switch=False)


def _black_hole(lab: Lab, node: int, rail: int | None) -> object:
    return lab.black_hole(node, rail)


def _lose_from(lab: Lab, node: int, rail: int | None) -> object:
    return lab.one_way(node, rail, "from")


def _lose_to(lab: Lab, node: int, rail: int | None) -> object:
    return lab.one_way(node, rail, "to")


def _refuse_egress(lab: Lab, node: int, rail: int | None) -> object:
    return lab.egress_refused(node, rail)


def _acknowledge_late(lab: Lab, node: int, rail: int | None) -> object:
    return lab.ack_backlog(node, rail)


def _acknowledge_for_the_peer(lab: Lab, node: int, rail: int | None) -> object:
    return lab.middlebox_ack(node, rail)


def _mtu_hole(lab: Lab, node: int, rail: int | None) -> object:
    return lab.mtu_hole(node, rail)


def _reset(lab: Lab, node: int, rail: int | None) -> object:
    return lab.reset(node, rail)


def _slow_down(lab: Lab, node: int, rail: int | None) -> object:
    return lab.limit(node, rail, mbit=20)


def _heal(lab: Lab, node: int, rail: int | None) -> object:
    return lab.heal(node, rail)


def _take_address(lab: Lab, node: int, rail: int | None) -> object:
    return lab.nodes[node].run("ip", "address", "del", *_address(lab, node, rail))


def _give_address(lab: Lab, node: int, rail: int | None) -> object:
    return lab.nodes[node].run("ip", "address", "add", *_address(lab, node, rail))


def _address(lab: Lab, node: int, rail: int | None) -> tuple[str, str, str]:
    return f"{lab.nodes[node].address(rail)}/24", "dev", nic_name(rail)


KINDS = {
    "carrier_loss": FaultMaker(_cut_cable, _heal),
    "black_hole": FaultMaker(_black_hole, _heal),
    "peer_port_loss": FaultMaker(_set_port_down, _heal),
    "address_loss": FaultMaker(_take_address, _give_address),
    "one_way_loss_from": FaultMaker(_lose_from, _heal),
    "one_way_loss_to": FaultMaker(_lose_to, _heal),
    "egress_refused": FaultMaker(_refuse_egress, _heal),
    "ack_backlog": FaultMaker(_acknowledge_late, _heal, leaves_up=False),
    "middlebox_ack": FaultMaker(_acknowledge_for_the_peer, _heal, leaves_up=False),
    "mtu_hole": FaultMaker(_mtu_hole, _heal, leaves_up=False),
    "reset": FaultMaker(_reset, _heal, leaves_up=False),
    "slow": FaultMaker(_slow_down, _heal, leaves_up=False),
    "flap": FaultMaker(_cut_cable, _heal, cycle_s=(0.3, 0.5)),
}
