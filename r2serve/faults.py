"""Kinds of faults. A kind has the same name in code, journals, metrics, commands and results.

A kind names the fault itself; a rail's cause names the first symptom detected by the worker.
Commands accept deprecated names with a note; no output contains a deprecated name.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FaultKind:
    """A kind of fault, with its meaning as a sentence; ``old`` are its deprecated names."""

    name: str
    meaning: str
    old: tuple[str, ...] = ()


FAULT_KINDS = {
    kind.name: kind
    for kind in (
        FaultKind(
            "carrier_loss",
            "A port loses its carrier (cable, transceiver, switch port).",
            ("cut", "carrier", "cable"),
        ),
        FaultKind(
            "peer_port_loss",
            "The peer's port goes down; the local carrier stays up.",
            ("peer-port", "port", "peer's port"),
        ),
        FaultKind("address_loss", "A port loses its address; the carrier stays up.", ("address",)),
        FaultKind(
            "black_hole",
            "Packets vanish in both directions; the carrier is up and no error appears.",
            ("drop", "blackhole", "black-hole", "black hole"),
        ),
        FaultKind(
            "one_way_loss_from",
            "Packets from the node vanish; the other direction works.",
            ("loss-from",),
        ),
        FaultKind(
            "one_way_loss_to",
            "Packets to the node vanish; the other direction works.",
            ("loss-to",),
        ),
        FaultKind(
            "egress_refused",
            "The node's own kernel drops packets before the port: a filter, a full queue.",
        ),
        FaultKind(
            "ack_backlog",
            "The node's kernel acknowledges tens of ms late: a backlog, a socket whose owner does "
            "not run.",
        ),
        FaultKind(
            "middlebox_ack",
            "A proxy or another hop acknowledges bytes that the peer does not get.",
        ),
        FaultKind("mtu_hole", "Small packets pass; large packets vanish.", ("mtu",)),
        FaultKind(
            "reset", "Connections end with an RST; a new connection succeeds at once.", ("error",)
        ),
        FaultKind("slow", "A rail has a fraction of its bandwidth."),
        FaultKind("flap", "Repeated ``carrier_loss``."),
        FaultKind("corrupt", "Bytes change on the way, and no checksum of the path detects this."),
    )
}
DATA_RAILS = ("tcp", "verbs")
"""Kinds of rails open to fault injection; shared-memory rails and control rails are not."""

_NAME_OF = {word: kind.name for kind in FAULT_KINDS.values() for word in kind.old}


def canonical(word: str) -> str:
    """Returns the name of a kind for a deprecated name; returns any other word unchanged."""
    return _NAME_OF.get(word, word)


def note_on(word: str) -> str:
    """Returns a deprecation note for a word; empty for a current name."""
    return f"`{word}` is deprecated: use `{_NAME_OF[word]}`" if word in _NAME_OF else ""
