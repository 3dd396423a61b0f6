"""Network faults of a lab, each made at its real place: port, cable or switch.

A port can lose its carrier, be taken off the bridge, be filtered (nftables, at the switch port),
be slowed down (token bucket, at both ends of the cable), be refused by the node itself, or have its
packets held by a middlebox. ``heal`` undoes every fault. Filters see frames before segmentation by
the NIC, so packet lengths are lengths of whole writes.

Rail ``None`` is the port of the management network; every fault exists there, too.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal

from r2serve.lab.middleboxes import Middlebox

if TYPE_CHECKING:
    from r2serve.lab.holder import Holder
    from r2serve.lab.nodes import Node

# "from": node into switch; "to": switch to node.
Direction = Literal["from", "to"]

_HOOKS = {"from": "ingress", "to": "egress"}
# Queue length of a rate-limited port, in time; the port drops packets beyond the queue.
_BUFFER_MS = 20
_SMALLEST_BURST_BYTES = 16 * 1024

Port = tuple[int, int | None]
"""Node, and rail or None."""


class Faults(ABC):
    """Makes and heals faults at the ports of a lab.

    Every method takes a node and a rail (None: the management port). Methods for faults return the
    time of the fault, CLOCK_MONOTONIC in ns. A port has a single filter; a new filter replaces the
    old filter.

    Raises:
        ValueError: the lab has no port for the node and rail.
        LabCommandError: the kernel refuses; filters need nftables, limits need tc.
    """

    rails: int
    nodes: list[Node]

    def __init__(self) -> None:
        self._filtered: set[Port] = set()
        self._limited: set[Port] = set()
        self._refused: set[Port] = set()
        self._boxes: dict[Port, Middlebox] = {}

    @abstractmethod
    def _require_switch(self) -> Holder:
        """Returns the switch's holder; raises LabUnavailableError if the lab is not built."""

    def port(self, node: int, rail: int | None) -> str:
        """Returns the name of the switch port for a node's NIC."""
        self._check_port(node, rail)
        return port_name(node, rail)

    def carrier(self, node: int, rail: int | None) -> bool:
        """Returns True if the node's port has a carrier."""
        self._check_port(node, rail)
        text = self.nodes[node].run("ip", "-json", "link", "show", "dev", nic_name(rail))
        return "LOWER_UP" in json.loads(text)[0]["flags"]

    def cut(self, node: int, rail: int | None, *, at_switch: bool = True) -> int:
        """Removes the carrier.

        at_switch: True sets the switch port down (the node's port stays administratively up,
        without carrier); False sets the node's port down (the switch port loses the carrier).
        """
        self._check_port(node, rail)
        if at_switch:
            holder, device = self._require_switch(), port_name(node, rail)
        else:
            holder, device = self.nodes[node].holder, nic_name(rail)
        return holder.set_down(device)

    def black_hole(self, node: int, rail: int | None) -> int:
        """Drops all packets of the port in both directions; the carrier stays up."""
        port = self.port(node, rail)
        return self._require_switch().unplug(port, bridge_name(rail))

    def one_way(self, node: int, rail: int | None, direction: Direction) -> int:
        """Drops all packets from the node ("from") or to the node ("to"), at the switch."""
        return self._filter(node, rail, {direction: ["drop"]})

    def mtu_hole(self, node: int, rail: int | None, mtu: int = 1000) -> int:
        """Silently drops IP packets longer than `mtu` bytes, in both directions, at the switch.

        The rail's NICs no longer batch segments, because a wire has single packets.

        mtu: 68 to 65535 bytes, the range of IPv4.
        """
        if not 68 <= mtu <= 65535:
            raise ValueError(f"mtu must be 68 to 65535 bytes, not {mtu}")
        self._check_port(node, rail)
        for each in self.nodes:
            each.run("ip", "link", "set", "dev", nic_name(rail), "gso_max_segs", "1")
        rule = f"ip length > {mtu} drop"
        return self._filter(node, rail, {"from": [rule], "to": [rule]})

    def egress_refused(self, node: int, rail: int | None) -> int:
        """Makes the node's kernel drop all packets that the node sends over the port.

        The queue of the node's own port has no room, so TCP counts no packet as sent. Packets to
        the node still arrive.
        """
        self._check_port(node, rail)
        full = ["tc", "qdisc", "replace", "dev", nic_name(rail), "root", "pfifo", "limit", "0"]
        at_ns = int(self.nodes[node].holder.run(*full)["at_ns"])
        self._refused.add((node, rail))
        return at_ns

    def ack_backlog(
        self, node: int, rail: int | None, *, hold_ms: int = 40, period_ms: int = 100
    ) -> int:
        """Delays the node's acknowledgements by up to `hold_ms` ms, in every period.

        TCP packets from the node wait at the switch during the first `hold_ms` ms of each
        `period_ms` ms, in order. The backlog of a socket has the same effect while the owner of the
        socket does not run in the middle of a system call. period_ms: 2 to 10000; hold_ms: 1 to
        below period_ms.
        """
        if not 1 <= hold_ms < period_ms <= 10_000:
            raise ValueError(
                f"hold_ms and period_ms must be 1 <= hold_ms < period_ms <= 10000, not {hold_ms} "
                f"and {period_ms}"
            )
        return self._intercept(node, rail, "late", str(hold_ms), str(period_ms))

    def middlebox_ack(self, node: int, rail: int | None) -> int:
        """Acknowledges the node's TCP data at the switch, and holds the data until healed.

        Other packets pass, so the node's own acknowledgements and its new connections do, too.
        """
        return self._intercept(node, rail, "acknowledge")

    def reset(self, node: int, rail: int | None) -> int:
        """Closes the node's TCP connections over the port; the other end receives an RST."""
        self._check_port(node, rail)
        there = self.nodes[node]
        kill = ["ss", "--kill", "--tcp", "--numeric", "src", there.address(rail)]
        return int(there.holder.run(*kill)["at_ns"])

    def half_open(self, node: int, rail: int | None) -> int:
        """Like reset, but the switch drops the RSTs, so the other end is not notified."""
        self._filter(node, rail, {"from": ["tcp flags & rst == rst drop"]})
        return self.reset(node, rail)

    def stale(self, node: int, rail: int | None) -> int:
        """Drops the packets of all currently open TCP connections over the port, both ways.

        New connections pass, as with a firewall after the loss of its state. Raises ValueError if
        no connection is open.
        """
        self._check_port(node, rail)
        there = self.nodes[node]
        address = there.address(rail)
        listing = there.run("ss", "--no-header", "--tcp", "--numeric", "src", address)
        rules: dict[Direction, list[str]] = {"from": [], "to": []}
        for line in listing.splitlines():
            near, far = (words.rpartition(":")[2] for words in line.split()[3:5])
            rules["from"].append(f"ip saddr {address} tcp sport {near} tcp dport {far} drop")
            rules["to"].append(f"ip daddr {address} tcp sport {far} tcp dport {near} drop")
        if not rules["from"]:
            raise ValueError(f"node {node} has no connection over {_said(rail)}")
        return self._filter(node, rail, rules)

    def flip(self, node: int, rail: int | None, *, offset: int = 5000, every: int = 20) -> int:
        """Corrupts data sent by the node, undetected by any checksum of the path.

        Applies to TCP packets longer than `offset` + 60 bytes, before segmentation by the NIC. In
        every `every`-th such packet, the byte at `offset` is overwritten with 0xA5. offset: bytes
        from the start of the TCP header, 60 (past any header) to 60000. every: 1 to 1000000.
        """
        if not 60 <= offset <= 60000:
            raise ValueError(f"offset must be 60 to 60000 bytes, not {offset}")
        if not 1 <= every <= 1_000_000:
            raise ValueError(f"every must be 1 to 1000000 segments, not {every}")
        rule = f"ip protocol tcp ip length > {offset + 60} numgen inc mod {every} 0"
        return self._filter(node, rail, {"from": [f"{rule} @th,{8 * offset},8 set 0xa5"]})

    def limit(self, node: int, rail: int | None, mbit: int) -> int:
        """Limits the port to `mbit` Mbit/s (1 to 100000) in each direction.

        Packets queued for more than 20 ms are dropped. A second limit replaces the first limit.
        """
        self._check_port(node, rail)
        if not 1 <= mbit <= 100_000:
            raise ValueError(f"mbit must be 1 to 100000 Mbit/s, not {mbit}")
        burst = max(_SMALLEST_BURST_BYTES, mbit * 125 // 2)  # 0.5 ms at this rate
        shape = ["tbf", "rate", f"{mbit}mbit", "burst", f"{burst}", "latency", f"{_BUFFER_MS}ms"]
        self.nodes[node].run("tc", "qdisc", "replace", "dev", nic_name(rail), "root", *shape)
        port = port_name(node, rail)
        answer = self._require_switch().run("tc", "qdisc", "replace", "dev", port, "root", *shape)
        self._limited.add((node, rail))
        return int(answer["at_ns"])

    def heal(self, node: int, rail: int | None) -> int:
        """Undoes all faults of this port; closed connections stay closed."""
        self._check_port(node, rail)
        port, switch = port_name(node, rail), self._require_switch()
        self.nodes[node].run("ip", "link", "set", nic_name(rail), "up")
        answer = switch.run("ip", "link", "set", port, "master", bridge_name(rail), "up")
        if (node, rail) in self._filtered:
            table = f"netdev faults_{port}"
            answer = switch.run("nft", f"add table {table}; delete table {table}")
            self._filtered.remove((node, rail))
            self._end_box(node, rail)
        if (node, rail) in self._refused:
            self.nodes[node].run("tc", "qdisc", "del", "dev", nic_name(rail), "root")
            self._refused.remove((node, rail))
        if (node, rail) in self._limited:
            self.nodes[node].run("tc", "qdisc", "del", "dev", nic_name(rail), "root")
            answer = switch.run("tc", "qdisc", "del", "dev", port, "root")
            self._limited.remove((node, rail))
        return int(answer["at_ns"])

    def _filter(self, node: int, rail: int | None, rules: dict[Direction, list[str]]) -> int:
        """Replaces the port's filter with `rules` in a single nftables transaction."""
        port = self.port(node, rail)
        self._end_box(node, rail)
        table = f"netdev faults_{port}"
        # Delete the old table with its chains. The first `add` makes the deletion always valid.
        script = [f"add table {table}", f"delete table {table}", f"add table {table}"]
        for direction, of_direction in rules.items():
            if direction not in _HOOKS:
                raise ValueError(f"direction must be 'from' or 'to', not {direction!r}")
            hook = f"type filter hook {_HOOKS[direction]} device {port} priority 0;"
            script.append(f"add chain {table} {direction} {{ {hook} }}")
            script += [f"add rule {table} {direction} {rule}" for rule in of_direction]
        at_ns = int(self._require_switch().run("nft", "; ".join(script))["at_ns"])
        self._filtered.add((node, rail))
        return at_ns

    def _intercept(self, node: int, rail: int | None, *options: str) -> int:
        """Leaves the node's TCP packets to a middlebox, which reads before the switch drops."""
        switch, port = self._require_switch(), self.port(node, rail)
        self._end_box(node, rail)
        _, user = self.nodes[node].namespaces
        box = Middlebox(switch.pid, user, port, bridge_name(rail), *options)
        try:
            at_ns = self._filter(node, rail, {"from": ["ip protocol tcp drop"]})
        except BaseException:
            box.close()
            raise
        self._boxes[node, rail] = box
        return at_ns

    def _end_box(self, node: int, rail: int | None) -> None:
        if (node, rail) in self._boxes:
            self._boxes.pop((node, rail)).close()

    def _check_port(self, node: int, rail: int | None) -> None:
        if not 0 <= node < len(self.nodes):
            raise ValueError(f"node {node} is not one of the lab's {len(self.nodes)} nodes")
        if rail is not None and not 0 <= rail < self.rails:
            raise ValueError(f"rail {rail} is not one of the lab's {self.rails} rails")


def port_name(node: int, rail: int | None) -> str:
    """Returns the name of a switch port."""
    return f"n{node}m" if rail is None else f"n{node}r{rail}"


def nic_name(rail: int | None) -> str:
    """Returns the name of a node's NIC."""
    return "mgmt0" if rail is None else f"rail{rail}"


def bridge_name(rail: int | None) -> str:
    """Returns the name of the switch's bridge for a rail or for the management network."""
    return "mgmt" if rail is None else f"rail{rail}"


def _said(rail: int | None) -> str:
    return "the management NIC" if rail is None else f"rail {rail}"
