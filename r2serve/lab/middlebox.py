"""A box between a node and a rail's network, for the lab. Run by path; standard library only.

    middlebox.py PORT BRIDGE late HOLD_MS PERIOD_MS
    middlebox.py PORT BRIDGE acknowledge

The switch drops the node's TCP packets at PORT, and the box reads a copy of each. `late` passes the
packets on through BRIDGE, but holds all packets during the first HOLD_MS of each PERIOD_MS.
`acknowledge` holds packets with data, and acknowledges the data to the node in the peer's name;
other packets pass. At the end of the standard input, the box passes on all held packets and ends.
"""

import errno
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from typing import NamedTuple, Protocol

# <linux/if_packet.h>, <linux/if_ether.h>, <asm/socket.h>
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
ETH_P_ALL, ETH_P_IP = 3, 0x0800
SO_RCVBUFFORCE = 33
# struct virtio_net_hdr: segmentation and checksum left to the NIC, kept as they are.
OFFLOADS = 10
ETHERNET = 14
LARGEST = OFFLOADS + ETHERNET + 65536
RECEIVE_BUFFER_BYTES = 8 << 20
# Bound of the packets read at the end, since packets that pass the switch keep arriving as copies.
LAST_PACKETS = 1000
ACK = 0x10
TIMESTAMPS = 8


class Segment(NamedTuple):
    """A TCP segment of a packet. timestamps: value and echo, 8 bytes; empty without the option."""

    addresses: bytes
    ports: tuple[int, int]
    sequence: int
    acknowledged: int
    window: int
    data_bytes: int
    timestamps: bytes


def parse(packet: bytes) -> Segment | None:
    """Returns the TCP segment of a packet; None for other packets. Fragments do not occur."""
    frame = memoryview(packet)[OFFLOADS:]
    if len(frame) < ETHERNET + 40 or frame[12:14] != struct.pack("!H", ETH_P_IP):
        return None
    ip = frame[ETHERNET:]
    if ip[9] != socket.IPPROTO_TCP:
        return None
    tcp = ip[4 * (ip[0] & 15) :]
    near, far, sequence, acknowledged, length, _, window = struct.unpack_from("!HHIIBBH", tcp)
    header = 4 * (length >> 4)
    return Segment(
        addresses=bytes(ip[12:20]),
        ports=(near, far),
        sequence=sequence,
        acknowledged=acknowledged,
        window=window,
        data_bytes=struct.unpack_from("!H", ip, 2)[0] - 4 * (ip[0] & 15) - header,
        timestamps=timestamps(bytes(tcp[20:header])),
    )


def timestamps(options: bytes) -> bytes:
    """Returns the timestamps among TCP options (RFC 7323); empty if absent."""
    at = 0
    while at + 1 < len(options) and options[at] != 0:
        if options[at] == TIMESTAMPS:
            return options[at + 2 : at + 10]
        at += 1 if options[at] == 1 else max(2, options[at + 1])
    return b""


def acknowledgement(packet: bytes, segment: Segment) -> bytes:
    """Returns a packet from the peer that acknowledges all data of `segment`.

    The window is the node's own, because the scale of the peer's window is unknown.
    """
    source, target = segment.addresses[:4], segment.addresses[4:]
    option = segment.timestamps
    if option:
        option = struct.pack("!BBBB", 1, 1, TIMESTAMPS, 10) + option[4:] + option[:4]
    position = (segment.sequence + segment.data_bytes) & 0xFFFFFFFF
    ports = segment.ports[1], segment.ports[0]
    length = (20 + len(option)) // 4 << 4
    fields = (*ports, segment.acknowledged, position, length, ACK, segment.window)
    tcp = struct.pack("!HHIIBBH", *fields) + bytes(4) + option
    pseudo = target + source + struct.pack("!HH", socket.IPPROTO_TCP, len(tcp))
    tcp = tcp[:16] + checksum(pseudo + tcp) + tcp[18:]
    ip = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(tcp), 0, 0x4000, 64, socket.IPPROTO_TCP, 0)
    ip += target + source
    ip = ip[:10] + checksum(ip) + ip[12:]
    near, far = packet[OFFLOADS + 6 : OFFLOADS + 12], packet[OFFLOADS : OFFLOADS + 6]
    return bytes(OFFLOADS) + near + far + struct.pack("!H", ETH_P_IP) + ip + tcp


def checksum(data: bytes) -> bytes:
    """Returns the checksum of the internet (RFC 1071); `data` has an even length."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return struct.pack("!H", total ^ 0xFFFF)


class Box(Protocol):
    """Decides on packets. held: packets not passed on yet, in order of arrival."""

    held: deque[bytes]

    def take(self, packet: bytes, segment: Segment) -> list[bytes]:
        """Takes a packet; returns the packets to send now."""
        ...

    def wait_s(self) -> float | None:
        """Returns the time until held packets are due, s; 0 = now, None = at the end."""
        ...


class Late:
    """Holds all packets during the first part of each period."""

    def __init__(self, hold_s: float, period_s: float) -> None:
        self.held: deque[bytes] = deque()
        self._hold_s, self._period_s = hold_s, period_s
        self._begun_s = time.monotonic()

    def take(self, packet: bytes, segment: Segment) -> list[bytes]:
        self.held.append(packet)
        return []

    def wait_s(self) -> float | None:
        phase_s = (time.monotonic() - self._begun_s) % self._period_s
        return max(0.0, self._hold_s - phase_s) if self.held else None


class Acknowledging:
    """Holds packets with data, and acknowledges the data."""

    def __init__(self) -> None:
        self.held: deque[bytes] = deque()

    def take(self, packet: bytes, segment: Segment) -> list[bytes]:
        if segment.data_bytes == 0:
            return [packet]
        self.held.append(packet)
        return [acknowledgement(packet, segment)]

    def wait_s(self) -> float | None:
        return None


def open_sockets(port: str, bridge: str) -> tuple[socket.socket, socket.socket]:
    """Returns a socket that reads packets from the node, and a socket that sends."""
    reader = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    try:
        reader.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BUFFER_BYTES)
    except PermissionError:  # in a user namespace, net.core.rmem_max is the limit
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    reader.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    reader.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    reader.setblocking(False)
    reader.bind((port, ETH_P_ALL))
    sender = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    sender.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    sender.bind((bridge, 0))
    return reader, sender


def serve(box: Box, reader: socket.socket, sender: socket.socket) -> None:
    """Handles packets until the end of the standard input."""
    over = False
    while not over:
        ready, _, _ = select.select([0, reader.fileno()], [], [], box.wait_s())
        over = 0 in ready and not os.read(0, 1)
        for _ in range(LAST_PACKETS if over else 1):
            try:
                packet = reader.recv(LARGEST)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.ENETDOWN:  # the port is down for a while
                    raise
                break
            segment = parse(packet)
            if segment is not None:
                for sent in box.take(packet, segment):
                    sender.send(sent)
        while box.held and (over or box.wait_s() == 0):
            sender.send(box.held.popleft())


def main(argv: list[str]) -> int:
    port, bridge, kind, *times = argv
    box: Box = Late(*(int(ms) / 1000 for ms in times)) if kind == "late" else Acknowledging()
    try:
        reader, sender = open_sockets(port, bridge)
    except OSError as error:
        os.write(1, f"{error}\n".encode())
        return 1
    os.write(1, b"ready\n")
    serve(box, reader, sender)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
