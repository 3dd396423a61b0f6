"""Wires between ports whose addresses do not tell them apart.

Link-local addresses and addresses of the hosts (on lo) are the same on every wire. If a node has
several ports with such addresses, a probe finds the wires: a TCP connection from each port to each
candidate of the peer, bound to the device at both ends. Crossed cables and nodes cabled in a
triangle are found in this way.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from r2serve.ports.addresses import family_of, socket_address
from r2serve.ports.common import Common, Way, all_common
from r2serve.ports.info import PortInfo, ProcessInfo

_LOG = logging.getLogger(__name__)
ANSWER_S = 3.0
"""Longest wait for the answers of all probes; Linux asks for a neighbour three times, in 3 s."""

Wire = tuple[str, str]
"""Both ends of a wire, each as ``node/device/address``."""
Nodes = tuple[str, str]
"""Nodes of two ports; ports of different nodes may have equal devices and addresses."""


@dataclass(frozen=True)
class Question:
    """A probe from a port of rank ``asking`` to a port of rank ``answering``."""

    asking: int
    answering: int
    own: PortInfo
    other: PortInfo
    nodes: Nodes = ("", "")
    """Nodes of ``own`` and ``other``."""

    @property
    def wire(self) -> Wire:
        return wire_of(self.own, self.other, self.nodes)


def wire_of(one: PortInfo, other: PortInfo, nodes: Nodes) -> Wire:
    """Returns the wire between two ports, by nodes, devices and addresses."""
    ends = zip(nodes, (one, other), strict=True)
    first, second = sorted(f"{node}/{port.device}/{port.address}" for node, port in ends)
    return first, second


def uncertain(possible: Mapping[tuple[int, int], Common]) -> list[tuple[int, int]]:
    """Returns the pairs of ports that need a probe.

    Ports with a common network have no need. A single pair is certain: no other pair could be
    meant.
    """
    sure = [pair for pair, found in possible.items() if found.way is Way.NETWORK]
    lows, highs = {low for low, _ in sure}, {high for _, high in sure}
    open_pairs = [
        pair
        for pair, found in possible.items()
        if found.way is Way.WIRE and pair[0] not in lows and pair[1] not in highs
    ]
    return open_pairs if len(open_pairs) > 1 else []


def questions(infos: Sequence[ProcessInfo]) -> list[Question]:
    """Returns the probes of all ranks, the same list on every rank.

    Ranks of a node with the same ports ask once: the first rank for all.
    """
    leaders: dict[tuple[str, tuple[tuple[str, str], ...]], int] = {}
    for rank, info in enumerate(infos):
        ends = tuple((port.device, port.address) for port in info.ports)
        leaders.setdefault((info.node, ends), rank)
    found = []
    ranks = list(leaders.values())
    for place, answering in enumerate(ranks):
        for asking in ranks[place + 1 :]:
            if infos[asking].node == infos[answering].node:
                continue
            possible = all_common(infos[asking].ports, infos[answering].ports)
            nodes = infos[asking].node, infos[answering].node
            for pair in uncertain(possible):
                both = possible[pair]
                found.append(Question(asking, answering, both.low, both.high, nodes))
    return found


def ask(asked: Sequence[Question], within_s: float = ANSWER_S) -> list[Wire]:
    """Sends probes; returns the wires with an answer of the peer's listener.

    Ends early once every port has a wire of its own.
    """
    found: list[Wire] = []
    with selectors.DefaultSelector() as waiting:
        try:
            for question in asked:
                probe = _connect(question)
                if probe is not None:
                    waiting.register(probe, selectors.EVENT_WRITE, question)
            deadline = time.monotonic() + within_s
            while waiting.get_map() and (left := deadline - time.monotonic()) > 0:
                if _all_joined(asked, found):
                    break
                for key, _ in waiting.select(left):
                    answered = key.fileobj
                    assert isinstance(answered, socket.socket)
                    code = answered.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    if code == 0:
                        found.append(key.data.wire)
                    _note(key.data, code)
                    waiting.unregister(answered)
                    answered.close()
        finally:
            for key in list((waiting.get_map() or {}).values()):
                assert isinstance(key.fileobj, socket.socket)
                _note(key.data, errno.ETIMEDOUT)
                key.fileobj.close()
    return found


def _all_joined(asked: Sequence[Question], found: Collection[Wire]) -> bool:
    """Whether each port of each pair of ranks has a wire, and as many as possible their own."""
    for ranks in {(each.asking, each.answering) for each in asked}:
        between = [each for each in asked if (each.asking, each.answering) == ranks]
        joined = [each for each in between if each.wire in found]
        if {each.own for each in joined} != {each.own for each in between}:
            return False
        if {each.other for each in joined} != {each.other for each in between}:
            return False
        pairs = {(each.own, each.other) for each in joined}
        few = min(len({own for own, _ in pairs}), len({other for _, other in pairs}))
        if not _has_partners(pairs, few):
            return False
    return True


def _has_partners(pairs: Collection[tuple[PortInfo, PortInfo]], count: int) -> bool:
    """Whether ``count`` pairs without a common port exist, by augmenting paths."""
    partner: dict[PortInfo, PortInfo] = {}

    def take(own: PortInfo, tried: set[PortInfo]) -> bool:
        for mine, other in pairs:
            if mine != own or other in tried:
                continue
            tried.add(other)
            if other not in partner or take(partner[other], tried):
                partner[other] = own
                return True
        return False

    for own in {own for own, _ in pairs}:
        take(own, set())
    return len(partner) >= count


def _connect(question: Question) -> socket.socket | None:
    """Begins a connection bound to the device; None: the kernel refuses at once."""
    own, other = question.own, question.other
    kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
    probe = socket.socket(family_of(own.address), kind)
    try:
        if own.device:
            _bind_to_device(probe, own.device)
        probe.bind(socket_address(own.address, 0, own.device))
        code = probe.connect_ex(socket_address(other.address, other.port, own.device))
    except OSError as error:
        code = error.errno or errno.EINVAL
    if code not in (0, errno.EINPROGRESS):
        _note(question, code)
        probe.close()
        return None
    return probe


def _bind_to_device(probe: socket.socket, device: str) -> None:
    """Binds a socket to a device where permitted; choice.py warns where not."""
    try:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
    except PermissionError as error:
        _LOG.debug("probe over %s is not bound to the device: %s", device, error)


def _note(question: Question, code: int) -> None:
    _LOG.debug("probe %s -> %s: %s", question.own, question.other, errno.errorcode.get(code, "ok"))
