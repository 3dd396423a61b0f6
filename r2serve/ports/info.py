"""Information about the ports of a process for its peers."""

from __future__ import annotations

import ipaddress
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from r2serve.errors import ConfigError
from r2serve.ports.addresses import UNSPECIFIED, UNSPECIFIED_V6
from r2serve.ports.choice import Port
from r2serve.ports.interfaces import Route
from r2serve.ports.pci import Distance, Function, distance, function
from r2serve.ports.rdma import Transport

SHORTEST_KEY = 32
"""Bytes of a pre-shared key, at least."""
PUBLIC_KEY_BYTES = 32
"""Bytes of an X25519 public key."""

_MOST_ROUTES = 64
"""Most routes of a port told to peers; more count as unknown."""


@dataclass(frozen=True)
class AddressInfo:
    """A further address of a port, with a listener for rails."""

    address: str
    port: int
    network: str = ""
    borrowed: bool = False
    """True: the address belongs to lo, not to the device."""
    fabric: str = ""
    """Fabric of verbs rails of this address; empty: rails use TCP."""
    gid: str = ""
    """GID of verbs rails of this address; empty: none."""


@dataclass(frozen=True)
class PortInfo:
    """A port with a listener for rails, by its first address."""

    device: str
    address: str
    port: int
    verbs_device: str = ""
    """RDMA device of this port's rails; empty: rails use TCP."""
    verbs_port: int = 0
    network: str = ""
    """Network of the address, as ``10.0.0.0/24``; empty: unknown."""
    fabric: str = ""
    """Fabric of verbs rails: ``InfiniBand``, ``RoCE v1`` or ``RoCE v2``; both ends must match."""
    gid: str = ""
    """GID of verbs rails; empty: none."""
    borrowed: bool = False
    """True: the address belongs to lo, not to the device (an unnumbered port)."""
    others: tuple[AddressInfo, ...] = ()
    """Further addresses of the port."""
    mtu: int = 0
    """MTU in bytes; 0: unknown."""
    mbit_s: int = 0
    """Link speed in Mbit/s; 0: unknown."""
    carrier: bool = True
    reserve: bool = False
    """True: the port carries traffic only when nothing better is left."""
    unit: str = ""
    """Name of the hardware; ports of a host with the same unit fail together. Empty: unknown."""
    routes: tuple[str, ...] | None = None
    """Networks with a route through the port; None: unknown."""
    shares_control: bool = False
    """True: the port carries the engine's control traffic, too."""
    away: int = Distance.SYS
    """:class:`~r2serve.ports.pci.Distance` from the GPU of the process."""
    why: str = ""
    """Reason why the port has no usable address so far; empty: it has one."""
    found: bool = False
    """True: the port has no usable address so far, and no list names it. Its rails are shown once
    they work."""

    @classmethod
    def of(
        cls,
        port: Port,
        transports: Sequence[Transport],
        numbers: Sequence[int | None] = (),
        gpu: Function | None = None,
    ) -> PortInfo:
        """Describes a port of this node for peers.

        Args:
            transports: transport of each address.
            numbers: listening TCP port of each address; None: the address has no listener. Empty:
                no address has a listener so far.
            gpu: the GPU of this process; None: none, or unknown.
        """
        transport = transports[0]
        numbers = numbers or [0] * len(port.addresses)
        others = zip(port.others, transports[1:], numbers[1:], strict=True)
        verbs = next((each.port for each in transports if each.port), None)
        return cls(
            device="" if port.device == "lo" else port.device,
            address=port.address,
            port=numbers[0] or 0,
            verbs_device=verbs.device if verbs else "",
            verbs_port=verbs.port if verbs else 0,
            network=port.network,
            fabric=transport.fabric,
            gid=_gid(transport),
            borrowed=port.borrowed,
            others=tuple(
                AddressInfo(
                    each.address, number, each.network, each.borrowed, its.fabric, _gid(its)
                )
                for each, its, number in others
                if number is not None
            ),
            mtu=port.mtu,
            mbit_s=port.mbit_s,
            carrier=port.carrier,
            reserve=bool(port.reserve),
            unit=port.unit.name,
            routes=_summary(port.routes),
            shares_control=port.shares_control,
            away=distance(gpu, function(port.pci)) if gpu else Distance.SYS,
            why=port.waits,
        )

    @classmethod
    def from_wire(cls, values: dict[str, Any]) -> PortInfo:
        """Makes a port of plain values; ignores unknown fields."""
        known = _known(cls, values)
        others = known.get("others", ())
        known["others"] = tuple(AddressInfo(**_known(AddressInfo, each)) for each in others)
        if known.get("routes") is not None:
            known["routes"] = tuple(known["routes"])
        return cls(**known)

    @property
    def waits(self) -> bool:
        """Whether the device is absent or has no address so far."""
        return self.address in (UNSPECIFIED, UNSPECIFIED_V6)

    @property
    def works(self) -> bool:
        """Whether the port has a usable address and a carrier, as far as known."""
        return self.carrier and not self.waits

    def views(self) -> tuple[PortInfo, ...]:
        """Returns the port by each of its addresses."""
        if not self.others:
            return (self,)
        names = [each.name for each in fields(AddressInfo)]
        first = AddressInfo(**{name: getattr(self, name) for name in names})
        return tuple(self._at(each) for each in (first, *self.others))

    def _at(self, other: AddressInfo) -> PortInfo:
        """Returns the port with another address as the first."""
        return replace(
            self,
            address=other.address,
            port=other.port,
            network=other.network,
            borrowed=other.borrowed,
            fabric=other.fabric,
            gid=other.gid,
            verbs_device=self.verbs_device if other.fabric else "",
            verbs_port=self.verbs_port if other.fabric else 0,
            others=(),
        )

    def __str__(self) -> str:
        verbs = f"{self.verbs_device}:{self.verbs_port}" if self.verbs_device else "no verbs"
        words = [self.address, verbs, self.fabric]
        return f"{self.device or 'lo'} ({', '.join(word for word in words if word)})"


def _gid(transport: Transport) -> str:
    return str(transport.gid.address) if transport.gid else ""


def _known(kind: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of the fields of a class; ignores unknown fields."""
    names = {each.name for each in fields(kind)}
    return {name: value for name, value in values.items() if name in names}


def _summary(routes: Iterable[Route] | None) -> tuple[str, ...] | None:
    """Returns the networks of routes, without networks inside others; None: unknown, too many."""
    if routes is None:
        return None
    found: list[str] = []
    for version in (4, 6):
        networks = [ipaddress.ip_network(route.destination) for route in routes]
        own = [network for network in networks if network.version == version]
        found += map(str, ipaddress.collapse_addresses(own))  # type: ignore[type-var]
    return tuple(found) if len(found) <= _MOST_ROUTES else None


@dataclass(frozen=True)
class ProcessInfo:
    """Information about a process for the other processes of its group, via the engine's store.

    ``process`` is the number of the r2ccl engine, ``unix_name`` the socket of the shm rail. Keys of
    rails derive from ``public_key`` of both ends (:mod:`r2serve.ports.keys`).
    """

    process: int
    public_key: bytes
    node: str
    host: str
    ports: tuple[PortInfo, ...]
    control: PortInfo | None
    unix_name: str
    gpu: int = -1
    """Index of the process's GPU among the GPUs of its host, by PCI address; -1: none."""
    unused: tuple[str, ...] = ()
    """Interfaces that are no rails, with the reasons; for errors."""
    confirmation: str = ""
    """Tag of the pre-shared key, see :func:`r2serve.ports.keys.confirmation`; empty: no key."""

    def to_wire(self) -> dict[str, Any]:
        """Returns plain values for a store."""
        return asdict(self) | {"public_key": self.public_key.hex()}

    @classmethod
    def from_wire(cls, values: dict[str, Any]) -> ProcessInfo:
        """Inverts :meth:`to_wire`; ignores unknown fields.

        Raises:
            ValueError: the public key has another form.
            KeyError, TypeError: a field is missing or has another type.
        """
        return cls(
            process=values["process"],
            public_key=_public_key(values.get("public_key")),
            node=values["node"],
            host=values["host"],
            ports=tuple(PortInfo.from_wire(port) for port in values["ports"]),
            control=PortInfo.from_wire(values["control"]) if values["control"] else None,
            unix_name=values["unix_name"],
            gpu=values.get("gpu", -1),
            unused=tuple(values.get("unused", ())),
            confirmation=str(values.get("confirmation", "")),
        )


def _public_key(text: Any) -> bytes:
    """Reads an X25519 public key of :meth:`ProcessInfo.to_wire`."""
    try:
        key = bytes.fromhex(text)
    except (TypeError, ValueError):
        key = b""
    if len(key) != PUBLIC_KEY_BYTES:
        raise ValueError(
            f"public_key is {_short(text)}; must be {PUBLIC_KEY_BYTES} bytes as "
            f"{2 * PUBLIC_KEY_BYTES} hexadecimal digits"
        )
    return key


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def read_key(path: str) -> bytes:
    """Returns the pre-shared key in a file; empty for an empty path.

    Raises:
        ConfigError: the file cannot be read, is open to other users, or is too short.
    """
    if not path:
        return b""
    try:
        with open(path, "rb") as file:
            others = stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077
            key = file.read().strip()
    except OSError as error:
        raise ConfigError(f"secret_file (R2CCL_SECRET_FILE): {path}: {error.strerror}") from error
    if others:
        raise ConfigError(
            f"secret_file (R2CCL_SECRET_FILE): {path} is open to other users; must be a file for "
            "its owner only (mode 600 or 400)"
        )
    if len(key) < SHORTEST_KEY:
        raise ConfigError(
            f"secret_file (R2CCL_SECRET_FILE): {path} has {len(key)} bytes; must be at least "
            f"{SHORTEST_KEY} bytes"
        )
    return key
