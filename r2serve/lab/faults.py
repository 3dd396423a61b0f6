"""The faults of a lab: each made where it happens in a data centre, and all undone by ``heal``.

A port can be cut, taken off its switch, filtered (by nftables, at the switch's end of the cable)
and slowed down (by a token bucket at both ends of the cable). Filters see frames as the NIC would
have got them before it splits them into packets; a length is therefore that of a whole write.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from r2serve.lab.holder import Holder
    from r2serve.lab.nodes import Node

# From the node into the switch, or from the switch to the node.
Direction = Literal["from", "to"]

_HOOKS = {"from": "ingress", "to": "egress"}
# What a port of this kind of switch holds back before it drops: 20 ms.
_BUFFER_MS = 20
_SMALLEST_BURST_BYTES = 16 * 1024


class Faults(ABC):
    """What can happen to the ports of a lab.

    Every method takes a node and a rail and raises ValueError where the lab has no such port, and
    LabCommandError where the kernel refuses (for filters and limits: without nftables or tc).
    Those that make a fault return the CLOCK_MONOTONIC time in ns at which it was made. A port has
    one filter at a time: a new one takes the place of the old one.
    """

    rails: int
    nodes: list[Node]

    def __init__(self) -> None:
        self._filtered: set[tuple[int, int]] = set()
        self._limited: set[tuple[int, int]] = set()

    @abstractmethod
    def _require_switch(self) -> Holder:
        """Where the commands of the switch run; raises LabUnavailableError before it is built."""

    def port(self, node: int, rail: int) -> str:
        """The switch's device that rail `rail` of node `node` is plugged into."""
        self._check_port(node, rail)
        return rail_port(node, rail)

    def carrier(self, node: int, rail: int) -> bool:
        """Whether the node's port sees a carrier."""
        self._check_port(node, rail)
        text = self.nodes[node].run("ip", "-json", "link", "show", "dev", f"rail{rail}")
        return "LOWER_UP" in json.loads(text)[0]["flags"]

    def cut(self, node: int, rail: int, *, at_switch: bool = True) -> int:
        """Takes the carrier away.

        at_switch: pull the cable at the switch (the node's port stays administratively up, without
        carrier); otherwise the node's own port is set down and the switch loses the carrier.
        """
        self._check_port(node, rail)
        if at_switch:
            holder, device = self._require_switch(), rail_port(node, rail)
        else:
            holder, device = self.nodes[node].holder, f"rail{rail}"
        return holder.set_down(device)

    def black_hole(self, node: int, rail: int) -> int:
        """Lets the switch drop all that comes from or goes to the port, with the carrier up."""
        port = self.port(node, rail)
        return self._require_switch().unplug(port, f"rail{rail}")

    def one_way(self, node: int, rail: int, direction: Direction) -> int:
        """Lets the switch drop all that comes from the node, or all that goes to it; never both."""
        return self._filter(node, rail, {direction: ["drop"]})

    def mtu_hole(self, node: int, rail: int, mtu: int = 1000) -> int:
        """Lets the switch drop, both ways and without a word, IP packets of more than `mtu` bytes.

        mtu: 68 to 65535, the smallest and the largest that IPv4 knows.
        """
        if not 68 <= mtu <= 65535:
            raise ValueError(f"mtu must be 68 to 65535 bytes, not {mtu}")
        rule = f"ip length > {mtu} drop"
        return self._filter(node, rail, {"from": [rule], "to": [rule]})

    def reset(self, node: int, rail: int) -> int:
        """Ends the node's TCP connections over the port; the other end is told by a RST."""
        self._check_port(node, rail)
        there = self.nodes[node]
        kill = ["ss", "--kill", "--tcp", "--numeric", "src", there.rail_address(rail)]
        return int(there.holder.run(*kill)["at_ns"])

    def half_open(self, node: int, rail: int) -> int:
        """As reset, but the switch drops every RST of the node: the other end hears nothing."""
        self._filter(node, rail, {"from": ["tcp flags & rst == rst drop"]})
        return self.reset(node, rail)

    def stale(self, node: int, rail: int) -> int:
        """Drops, both ways, the packets of the TCP connections that are open over the port now.

        Others pass, new ones too, as with a firewall that has lost its state. Raises ValueError
        where no connection is open.
        """
        self._check_port(node, rail)
        there = self.nodes[node]
        address = there.rail_address(rail)
        listing = there.run("ss", "--no-header", "--tcp", "--numeric", "src", address)
        rules: dict[Direction, list[str]] = {"from": [], "to": []}
        for line in listing.splitlines():
            near, far = (words.rpartition(":")[2] for words in line.split()[3:5])
            rules["from"].append(f"ip saddr {address} tcp sport {near} tcp dport {far} drop")
            rules["to"].append(f"ip daddr {address} tcp sport {far} tcp dport {near} drop")
        if not rules["from"]:
            raise ValueError(f"node {node} has no connection over rail {rail}")
        return self._filter(node, rail, rules)

    def flip(self, node: int, rail: int, *, offset: int = 5000, every: int = 20) -> int:
        """Writes 0xA5 over a byte of what the node sends, where no checksum of the path sees it.

        Of TCP segments with more than `offset` bytes after the start of the TCP header, in the
        sender's own cut, every `every`-th has that byte (counted from there) overwritten.
        offset: 60 (past any header) to 60000; every: 1 to 1000000.
        """
        if not 60 <= offset <= 60000:
            raise ValueError(f"offset must be 60 to 60000 bytes, not {offset}")
        if not 1 <= every <= 1_000_000:
            raise ValueError(f"every must be 1 to 1000000 segments, not {every}")
        rule = f"ip protocol tcp ip length > {offset + 60} numgen inc mod {every} 0"
        return self._filter(node, rail, {"from": [f"{rule} @th,{8 * offset},8 set 0xa5"]})

    def limit(self, node: int, rail: int, mbit: int) -> int:
        """Limits the port to `mbit` Mbit/s (1 to 100000) each way; what queues for 20 ms is lost.

        A second limit takes the place of the first one.
        """
        self._check_port(node, rail)
        if not 1 <= mbit <= 100_000:
            raise ValueError(f"mbit must be 1 to 100000 Mbit/s, not {mbit}")
        burst = max(_SMALLEST_BURST_BYTES, mbit * 125 // 2)  # half a millisecond's worth
        shape = ["tbf", "rate", f"{mbit}mbit", "burst", f"{burst}", "latency", f"{_BUFFER_MS}ms"]
        self.nodes[node].run("tc", "qdisc", "replace", "dev", f"rail{rail}", "root", *shape)
        port = rail_port(node, rail)
        answer = self._require_switch().run("tc", "qdisc", "replace", "dev", port, "root", *shape)
        self._limited.add((node, rail))
        return int(answer["at_ns"])

    def heal(self, node: int, rail: int) -> int:
        """Undoes every fault of this port, whichever there were; connections stay ended."""
        self._check_port(node, rail)
        port, switch = rail_port(node, rail), self._require_switch()
        self.nodes[node].run("ip", "link", "set", f"rail{rail}", "up")
        answer = switch.run("ip", "link", "set", port, "master", f"rail{rail}", "up")
        if (node, rail) in self._filtered:
            table = f"netdev faults_{port}"
            answer = switch.run("nft", f"add table {table}; delete table {table}")
            self._filtered.remove((node, rail))
        if (node, rail) in self._limited:
            self.nodes[node].run("tc", "qdisc", "del", "dev", f"rail{rail}", "root")
            answer = switch.run("tc", "qdisc", "del", "dev", port, "root")
            self._limited.remove((node, rail))
        return int(answer["at_ns"])

    def _filter(self, node: int, rail: int, rules: dict[Direction, list[str]]) -> int:
        """Makes `rules` the filter of the port, all at once."""
        port = self.port(node, rail)
        table = f"netdev faults_{port}"
        # Deleted with all that is in it; added first, because only what is there can be deleted.
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

    def _check_port(self, node: int, rail: int) -> None:
        if not 0 <= node < len(self.nodes):
            raise ValueError(f"node {node} is not one of the lab's {len(self.nodes)} nodes")
        if not 0 <= rail < self.rails:
            raise ValueError(f"rail {rail} is not one of the lab's {self.rails} rails")


def management_port(node: int) -> str:
    """The switch's device that the management NIC of a node is plugged into."""
    return f"n{node}m"


def rail_port(node: int, rail: int) -> str:
    return f"n{node}r{rail}"
