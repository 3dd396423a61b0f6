"""Pairing of the ports of two processes into rails."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from r2serve.errors import ConfigError
from r2serve.ports.common import Common, Way, all_common, common, why_nothing
from r2serve.ports.info import PortInfo, ProcessInfo
from r2serve.ports.nearness import distances_of
from r2serve.ports.wires import Nodes, Wire, uncertain, wire_of

_WAY_COST, _UNEQUAL_COST, _UNPAIRED_COST = 10**9, 10**6, 10**12


def rails_between(
    own: ProcessInfo,
    peer: ProcessInfo,
    own_node: int,
    *,
    require_verbs: bool = False,
    wires: Collection[Wire] = (),
    fallback: bool = False,
) -> list[dict[str, Any]]:
    """Returns the rails of the link from ``own`` to ``peer``, in the same order at both ends.

    :func:`pair_ports` joins ports; :func:`why_tcp` decides between verbs and TCP.

    Args:
        wires: pairs of ports with a wire, as answered by the probes of all nodes.
        fallback: the control rail may carry data (``R2CCL_FALLBACK``), so that it is enough.

    Raises:
        ConfigError: the processes are on different nodes and no port of the first reaches a port
            of the second, or a rail would use TCP although verbs are required.
    """
    if own.node == peer.node:
        return [_rail("shm", f"shm@node{own_node}", None, PortInfo("", peer.unix_name, 0))]
    control = own.control and peer.control
    for info in (own, peer):
        if not any(not port.waits for port in info.ports) and not (control and fallback):
            raise ConfigError(_no_port(info))
    rails = []
    pairs = _pairs_of(own, peer, wires)
    units = _units(pairs, peer.host)
    distances = distances_of(own, peer, pairs)
    for index, (local, remote) in enumerate(pairs):
        why = why_tcp(local, remote)
        if why and require_verbs:
            raise ConfigError(
                f"rdma (R2CCL_RDMA) is 'require', but {local} of {own.host} and {remote} of "
                f"{peer.host} would make a TCP rail: {why}"
            )
        name, kind = f"rail{index}@node{own_node}", "tcp" if why else "verbs"
        rails.append(
            _rail(kind, name, local, remote) | {"unit": units[index], "distance": distances[index]}
        )
    if own.control and peer.control:
        rails.append(_rail("control", f"control@node{own_node}", own.control, peer.control))
    if all(rail["kind"] == "control" for rail in rails) and not (control and fallback):
        raise ConfigError(
            f"R2CCL_RAILS: no port of {own.host} reaches a port of {peer.host}: "
            + no_data_rail(own, peer, wires)
        )
    return rails


def no_data_rail(own: ProcessInfo, peer: ProcessInfo, wires: Collection[Wire] = ()) -> str:
    """Returns the reasons why two nodes have no data rail: a part for each port."""
    return "; ".join(unpaired(own, peer, wires).values()) or "; ".join(
        _no_port(info) for info in (own, peer) if all(port.waits for port in info.ports)
    )


def unpaired(own: ProcessInfo, peer: ProcessInfo, wires: Collection[Wire] = ()) -> dict[str, str]:
    """Returns the ports of ``own`` without a rail to ``peer``, on another node.

    Returns:
        A sentence with the reason, by device.
    """
    # A port of the peer that was found without an address may never get one.
    used = {
        mine.device
        for mine, theirs in _pairs_of(own, peer, wires)
        if mine.found or not theirs.found
    }
    return _reasons(own.ports, peer.ports, peer.host, used)


def _no_port(info: ProcessInfo) -> str:
    """Returns the error for a node without a port that works, with the reason of each."""
    waiting = [f"{port.device} ({port.why})" for port in info.ports]
    why = ", ".join((*waiting, *info.unused)) or "the node has no other interface than lo"
    return (
        f"R2CCL_RAILS: no usable NIC on {info.host} (node {info.node}), but ranks are on "
        f"different nodes: {why}; name devices or addresses"
    )


def _pairs_of(
    own: ProcessInfo, peer: ProcessInfo, wires: Collection[Wire]
) -> list[tuple[PortInfo, PortInfo]]:
    """Returns the pairs of ports of two processes, with the port of ``own`` first."""
    if own.process < peer.process:
        return pair_ports(own.ports, peer.ports, wires, (own.node, peer.node))
    pairs = pair_ports(peer.ports, own.ports, wires, (peer.node, own.node))
    return [(mine, theirs) for theirs, mine in pairs]


def lonely_ports(
    own: ProcessInfo, peers: Sequence[ProcessInfo], wires: Collection[Wire] = ()
) -> list[tuple[bool, str]]:
    """Returns sentences about the ports of ``own`` without a rail to a peer of another node.

    Returns:
        Whether the port has no rail to any peer and is no reserve, and the sentence: one for each
        such port, and one for each host that another port does not reach.
    """
    reasons = [unpaired(own, peer, wires) for peer in peers if peer.node != own.node]
    reserves = {port.device for port in own.ports if port.reserve}
    told = {port.device for port in own.ports if port.waits}
    found: dict[str, list[str]] = {}
    for device, why in (entry for each in reasons for entry in each.items()):
        if device not in told and why not in found.setdefault(device, []):
            found[device].append(why)
    sentences: list[tuple[bool, str]] = []
    for device, (first, *more) in found.items():
        useless = device not in reserves and all(device in each for each in reasons)
        if useless and more:
            hosts = f"{len(more)} other host{'s' if len(more) > 1 else ''}"
            sentences.append((useless, f"{first}; nor to {hosts}"))
        else:
            sentences += [(useless, why) for why in (first, *more)]
    return sentences


def unpaired_ports(own: Sequence[PortInfo], other: Sequence[PortInfo], host: str) -> dict[str, str]:
    """As :func:`unpaired`, for the ports of a node and of another node, without probes."""
    used = {mine.device for mine, _ in pair_ports(own, other, None)}
    return _reasons(own, other, host, used) if own and other else {}


def _reasons(
    own: Sequence[PortInfo], others: Sequence[PortInfo], host: str, used: Collection[str]
) -> dict[str, str]:
    reasons = {}
    for port in own:
        if port.device in used:
            continue
        why = {_why_unpaired(port, other) for other in others}
        reasons[port.device] = f"{port} has no rail to {host}: {'; '.join(sorted(why))}"
    return reasons


def _why_unpaired(port: PortInfo, other: PortInfo) -> str:
    if other.found:
        return f"{other.device} there: {other.why}"
    if common(port, other) is not None:
        return "no answer over this port"
    return why_nothing(port, other)


def why_tcp(local: PortInfo, remote: PortInfo) -> str:
    """Returns the reason why a rail between two ports uses TCP; empty: the rail uses verbs.

    InfiniBand, RoCE v1 and RoCE v2 have different packets, so both ends of a queue pair must match.
    """
    without = [port.address for port in (local, remote) if not port.verbs_device]
    if without:
        return f"{' and '.join(without)} {'has' if len(without) == 1 else 'have'} no verbs"
    if local.fabric != remote.fabric:
        return f"{local.fabric or 'unknown'} does not reach {remote.fabric or 'unknown'}"
    return ""


def pair_ports(
    lower: Sequence[PortInfo],
    higher: Sequence[PortInfo],
    wires: Collection[Wire] | None = (),
    nodes: Nodes = ("", ""),
) -> list[tuple[PortInfo, PortInfo]]:
    """Pairs the ports of two processes into rails, in rail order.

    As many ports as possible get a partner of their own: in a common network before a route, of
    equal speed before another speed, in the order of ports. Each port left over joins a port of
    the other end that has the fewest rails. Ports without common addresses make no rail.

    Args:
        lower, higher: ports of the process with the lower and with the higher number, so that both
            ends compute the same pairs.
        wires: see :func:`rails_between`; None: not probed, so that any pair may have a wire.
        nodes: nodes of both processes, as in ``wires``.

    Returns:
        For each rail, both ports, by the addresses of the rail.
    """
    possible = _possible(lower, higher, wires, nodes)
    pairs = _best_partners(len(lower), len(higher), possible)
    users = Counter(end for low, high in pairs for end in (("low", low), ("high", high)))
    lonely = [("low", low) for low in range(len(lower)) if ("low", low) not in users]
    lonely += [("high", high) for high in range(len(higher)) if ("high", high) not in users]
    for side, index in lonely:
        mine = 0 if side == "low" else 1
        port = (lower, higher)[mine][index]
        fitting = [
            pair
            for pair in possible
            # A port that was found without an address gets no pair beyond its guessed partner.
            if pair[mine] == index and not (port.found and possible[pair].way is Way.LATER)
        ]
        other = "high" if side == "low" else "low"
        best = min(
            fitting,
            key=lambda pair: (
                possible[pair].way,
                possible[pair].unequal,
                users[other, pair[1 - mine]],
                pair,
            ),
            default=None,
        )
        if best is not None:
            pairs.append(best)
            users[other, best[1 - mine]] += 1
    pairs.sort(key=lambda pair: (max(pair), pair))
    return [(possible[pair].low, possible[pair].high) for pair in pairs]


def _possible(
    lower: Sequence[PortInfo],
    higher: Sequence[PortInfo],
    wires: Collection[Wire] | None,
    nodes: Nodes,
) -> dict[tuple[int, int], Common]:
    """Returns what each pair of ports has in common, without pairs that cannot work."""
    possible = all_common(lower, higher)
    if wires is None:
        return possible
    answered = {end for wire in wires for end in wire}
    for pair in uncertain(possible):
        found = possible[pair]
        wire = wire_of(found.low, found.high, nodes)
        if wire in wires:
            continue
        # A port with a wire has no second wire. Other ports may come up after the start.
        if answered.isdisjoint(wire):
            possible[pair] = Common(Way.LATER, found.low, found.high)
        else:
            del possible[pair]
    return possible


def _best_partners(
    lows: int, highs: int, possible: Mapping[tuple[int, int], Common]
) -> list[tuple[int, int]]:
    """Returns the pairs of the cheapest assignment; every port is in one pair at most.

    Each low port takes a partner in turn. If the partner is taken, the port before moves to
    another partner, along the cheapest chain of moves (successive shortest paths).
    """
    costs = {
        (low, high): found.way * _WAY_COST + found.unequal * _UNEQUAL_COST + (low - high) ** 2
        for (low, high), found in possible.items()
    }
    # Each low port may stay without a partner, at the place after the high ports.
    costs |= {(low, highs + low): _UNPAIRED_COST for low in range(lows)}
    partner: dict[int, int] = {}  # by high port
    for low in range(lows):
        # Cost of the cheapest chain that ends at a high port, and the low port before its end.
        reached: dict[int, tuple[int, int]] = {}
        waiting = deque([(low, 0)])
        while waiting:
            mover, so_far = waiting.popleft()
            for high in range(highs + lows):
                cost = costs.get((mover, high))
                if cost is None or partner.get(high) == mover:
                    continue
                total = so_far + cost - _UNPAIRED_COST
                if high in reached and reached[high][0] <= total:
                    continue
                reached[high] = (total, mover)
                if high in partner:
                    loses = costs[partner[high], high] - _UNPAIRED_COST
                    waiting.append((partner[high], total - loses))
        free = [high for high in reached if high not in partner]
        end = min(free, key=lambda high: (reached[high][0], high))
        _move(partner, reached, low, end)
    return [(low, high) for high, low in partner.items() if high < highs]


def _move(
    partner: dict[int, int], reached: Mapping[int, tuple[int, int]], start: int, end: int
) -> None:
    """Moves the ports along the chain from the low port ``start`` to the high port ``end``."""
    while True:
        mover = reached[end][1]
        before = next((high for high, low in partner.items() if low == mover), None)
        partner[end] = mover
        if mover == start or before is None:
            return
        del partner[before]
        end = before


def _rail(kind: str, name: str, local: PortInfo | None, remote: PortInfo) -> dict[str, Any]:
    ready = local is None or local.works
    return {
        "kind": kind,
        "name": name,
        "device": local.device if local else "",
        "local_address": local.address if local else "",
        "remote_address": remote.address,
        "remote_port": remote.port,
        "remote_device": remote.device,
        "verbs_device": local.verbs_device if local else "",
        "verbs_port": local.verbs_port if local else 0,
        "unnumbered": local is not None and local.borrowed,
        "told": not ready,
        "late": not (ready and remote.works),
        "dormant": remote.found or (local is not None and local.found),
        "reserve": remote.reserve or (local is not None and local.reserve),
        "unit": "",
        "distance": 0,
    }


def _units(pairs: Sequence[tuple[PortInfo, PortInfo]], peer_host: str) -> list[str]:
    """Returns the hardware that each rail shares with other rails; empty: a rail of its own.

    Hardware of this node counts before hardware of the peer, so that two rails without a common
    part never have the same unit.
    """
    here = Counter(own.unit for own, _ in pairs)
    units = [own.unit if here[own.unit] > 1 else "" for own, _ in pairs]
    alone = [other.unit for (_, other), unit in zip(pairs, units, strict=True) if not unit]
    there = Counter(alone)
    return [
        unit or (f"{other.unit} of {peer_host}" if other.unit and there[other.unit] > 1 else "")
        for (_, other), unit in zip(pairs, units, strict=True)
    ]
