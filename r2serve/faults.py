"""Kinds of faults: one name each, in code, journals, metrics and what people type.

A kind is what goes wrong; a rail's cause is what its worker detected first. Words of earlier
releases are still taken where people type, with a note, and are put out nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FaultKind:
    """``old``: words of earlier releases for it."""

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
            "The peer's port goes; the own carrier stays.",
            ("peer-port", "port", "peer's port"),
        ),
        FaultKind("address_loss", "A port loses its address; the carrier stays.", ("address",)),
        FaultKind(
            "black_hole",
            "Nothing passes, either way; carrier up, no error anywhere.",
            ("drop", "blackhole", "black-hole", "black hole"),
        ),
        FaultKind(
            "one_way_loss_from",
            "Nothing passes from the node; the other direction is well.",
            ("loss-from",),
        ),
        FaultKind(
            "one_way_loss_to",
            "Nothing passes to the node; the other direction is well.",
            ("loss-to",),
        ),
        FaultKind("mtu_hole", "Small packets pass, large ones vanish.", ("mtu",)),
        FaultKind("reset", "Connections end with an RST; a new one succeeds at once.", ("error",)),
        FaultKind("slow", "A rail has a fraction of its bandwidth."),
        FaultKind("flap", "``carrier_loss`` again and again."),
        FaultKind("corrupt", "Bytes change on the way, and no checksum of the path sees it."),
        FaultKind("mgmt_carrier_loss", "The management NIC loses its carrier.", ("mgmt-nic",)),
    )
}
DATA_RAILS = ("tcp", "verbs")
"""Kinds of rails that a fault can be made on: neither a node's inside nor the control plane."""

_NAME_OF = {word: kind.name for kind in FAULT_KINDS.values() for word in kind.old}


def canonical(word: str) -> str:
    """The name of the kind that a word of people stands for; an unknown word stays as it is."""
    return _NAME_OF.get(word, word)


def note_on(word: str) -> str:
    """What to tell about a word that a later release will not take; empty: nothing."""
    return f"`{word}` is an old word for `{_NAME_OF[word]}` and goes" if word in _NAME_OF else ""
