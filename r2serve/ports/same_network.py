"""Ports of a node in one network, and the kernel's settings that mix them up."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

Setting = Callable[[str, str], int]
"""Returns a setting of IPv4 for a device and a name; 0: unknown."""


def sysctl(device: str, name: str) -> int:
    """Returns a setting of IPv4: the higher of the device's value and ``all``."""
    base = Path("/proc/sys/net/ipv4/conf")
    values = []
    for scope in (device, "all"):
        try:
            values.append(int((base / scope / name).read_text()))
        except (OSError, ValueError):
            continue
    return max(values, default=0)


def problems(networks: Iterable[tuple[str, str]], setting: Setting = sysctl) -> list[str]:
    """Returns a sentence for each network with several ports and settings that mix them up.

    A network of a single address, as on unnumbered ports, has no neighbours.

    Args:
        networks: device and network of each address.
    """
    by_network: dict[str, list[str]] = {}
    for device, network in networks:
        if network and ":" not in network and device not in ("", "lo"):
            devices = by_network.setdefault(network, [])
            if device not in devices:
                devices.append(device)
    found = []
    for network, devices in by_network.items():
        if len(devices) > 1 and ipaddress.ip_network(network).num_addresses > 1:
            found += _problems_of(network, devices, setting)
    return found


def _problems_of(network: str, devices: Sequence[str], setting: Setting) -> list[str]:
    names = " and ".join(devices)
    found = []
    # On a wire of its own, a port answers for all addresses of the node without harm.
    loose = [each for each in devices if setting(each, "arp_ignore") == 0]
    if loose and not ipaddress.ip_network(network).is_link_local:
        found.append(
            f"{names} are in one network, {network}, and {' and '.join(loose)} may answer ARP for "
            "each other's addresses (arp_ignore is 0): a rail may use the wrong port, or may not "
            "come up. Set net.ipv4.conf.all.arp_ignore=1 and net.ipv4.conf.all.arp_announce=2, or "
            "give each rail a network of its own"
        )
    strict = [each for each in devices if setting(each, "rp_filter") == 1]
    if strict:
        found.append(
            f"{names} are in one network, {network}, and {' and '.join(strict)} drop packets whose "
            "way back is another port (rp_filter is 1): rails may not come up. Set "
            "net.ipv4.conf.<device>.rp_filter=2"
        )
    return found
