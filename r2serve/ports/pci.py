"""PCI functions from sysfs: locations and distances."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

SYSFS = Path("/sys/bus/pci/devices")


class Distance(IntEnum):
    """Distance of two PCI functions, with the names of ``nvidia-smi topo``; small is near."""

    PIX = 0
    """A single PCIe switch, or none, in between."""
    PXB = 1
    """Several PCIe switches in between."""
    PHB = 2
    """The host bridge of a single socket in between."""
    NODE = 3
    """Several host bridges of the same NUMA node in between."""
    SYS = 4
    """Different NUMA nodes, or unknown."""


@dataclass(frozen=True)
class Function:
    """A PCI function; ``path`` leads from the host bridge to the function."""

    address: str
    numa_node: int
    path: tuple[str, ...]


def function(address: str, sysfs: Path = SYSFS) -> Function | None:
    """Returns the function at an address; None: no such function."""
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
    """Returns the distance between two functions; an unknown function is ``SYS`` away."""
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
    # Below a common switch, each path has a port of the switch and the function.
    below = max(len(one.path), len(other.path)) - shared
    return Distance.PIX if below <= 2 else Distance.PXB


def gpus(sysfs: Path = SYSFS) -> list[Function]:
    """Returns NVIDIA's display and 3D controllers, ordered by address."""
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
