"""Where PCI functions are, and how far apart, from sysfs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

SYSFS = Path("/sys/bus/pci/devices")


class Distance(IntEnum):
    """What lies between two PCI functions, in the words of ``nvidia-smi topo``; nearer is less."""

    PIX = 0
    """One PCIe switch at most."""
    PXB = 1
    """Several switches."""
    PHB = 2
    """The host bridge of one socket."""
    NODE = 3
    """Several host bridges of one NUMA node."""
    SYS = 4
    """Two NUMA nodes, or nobody knows."""


@dataclass(frozen=True)
class Function:
    """A PCI function; ``path`` leads from its host bridge to it."""

    address: str
    numa_node: int
    path: tuple[str, ...]


def function(address: str, sysfs: Path = SYSFS) -> Function | None:
    """The function of that address; None: there is none."""
    directory = sysfs / address
    if not address or not directory.exists():
        return None
    parts = directory.resolve().parts
    roots = [place for place, part in enumerate(parts) if part.startswith("pci")]
    path = parts[roots[0] :] if roots else (address,)
    try:
        numa_node = int((directory / "numa_node").read_text())
    except OSError:
        numa_node = -1
    return Function(address, numa_node, path)


def distance(one: Function | None, other: Function | None) -> Distance:
    """From one function to another."""
    if one is None or other is None:
        return Distance.SYS
    if one.path[0] != other.path[0]:
        near = one.numa_node == other.numa_node >= 0
        return Distance.NODE if near else Distance.SYS
    shared = 0
    for mine, theirs in zip(one.path, other.path, strict=False):
        if mine != theirs:
            break
        shared += 1
    if shared == 1:
        return Distance.PHB
    # Below one switch each has a port of the switch and itself.
    below = max(len(one.path), len(other.path)) - shared
    return Distance.PIX if below <= 2 else Distance.PXB


def gpus(sysfs: Path = SYSFS) -> list[Function]:
    """NVIDIA's display and 3D controllers, in the order of their addresses."""
    found = []
    for directory in sorted(sysfs.glob("*")):
        try:
            vendor = int((directory / "vendor").read_text(), 16)
            kind = int((directory / "class").read_text(), 16) >> 8
        except (OSError, ValueError):
            continue
        if vendor == 0x10DE and kind in (0x0300, 0x0302):
            made = function(directory.name, sysfs)
            if made is not None:
                found.append(made)
    return found
