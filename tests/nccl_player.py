"""A player in NCCL's place: two ranks exchange checked messages over the network plugin.

    nccl_player.py --nnodes 2 --node-rank RANK --master-addr ADDRESS [SCRIPT]

The options are those of torchrun, and SCRIPT stands for a training script. The plugin is the
library of NCCL_NET_PLUGIN, called by version 8 of the interface as csrc/netplugin/abi.hpp has it.
A TCP connection to the address of node 0 is NCCL's bootstrap. Each rank prints the number of rounds
several times a second. Rank 0 ends both ranks once a file `stop` is in its working directory.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HANDLE_BYTES = 128
MESSAGE_BYTES = 100_000
BOOTSTRAP_PORT = 29_517
START_S = 60.0
POLL_S = 0.0005
HOST_MEMORY = 1
PR_SET_NAME = 15
SERVICE = b"NCCL Service  0"
"""Name of NCCL's service thread, under NCCL_SET_THREAD_NAME=1."""

_POINTER = ctypes.c_void_p
_INT = ctypes.c_int
_FUNCTIONS = (
    "name",
    "init",
    "devices",
    "get_properties",
    "listen",
    "connect",
    "accept",
    "register_memory",
    "register_dma_buf",
    "deregister_memory",
    "send",
    "receive",
    "flush",
    "test",
    "close_send",
    "close_receive",
    "close_listen",
)
_TYPES: dict[str, tuple[Any, ...]] = {
    "init": (_POINTER,),
    "devices": (_POINTER,),
    "listen": (_INT, _POINTER, _POINTER),
    "connect": (_INT, _POINTER, _POINTER, _POINTER),
    "accept": (_POINTER, _POINTER, _POINTER),
    "register_memory": (_POINTER, _POINTER, ctypes.c_size_t, _INT, _POINTER),
    "deregister_memory": (_POINTER, _POINTER),
    "send": (_POINTER, _POINTER, _INT, _INT, _POINTER, _POINTER),
    "receive": (_POINTER, _INT, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER),
    "test": (_POINTER, _POINTER, _POINTER),
    "close_send": (_POINTER,),
    "close_receive": (_POINTER,),
    "close_listen": (_POINTER,),
}
_LOGGER = ctypes.CFUNCTYPE(
    None,
    _INT,
    ctypes.c_ulong,
    ctypes.c_char_p,
    _INT,
    ctypes.c_char_p,
    ctypes.c_char_p,  # the plugin's only format is "NET/r2ccl: %s"
)


class PluginError(RuntimeError):
    """A function of the plugin has returned an error."""


@_LOGGER
def _log(
    _level: int, _subsystems: int, _function: bytes, _line: int, form: bytes, text: bytes
) -> None:
    os.write(2, form.replace(b"%s", text) + b"\n")


class Net:
    """The plugin of a library."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        table = _POINTER.in_dll(self._library, "ncclNetPlugin_v8")
        self._at = ctypes.addressof(table)
        self.name = (ctypes.c_char_p.from_address(self._at).value or b"").decode()
        self._calls = {name: self._function(name) for name in _TYPES}

    def _function(self, name: str) -> Callable[..., int]:
        place = self._at + ctypes.sizeof(_POINTER) * _FUNCTIONS.index(name)
        address = _POINTER.from_address(place).value
        assert address is not None, name
        made: Callable[..., int] = ctypes.CFUNCTYPE(_INT, *_TYPES[name])(address)
        return made

    def call(self, name: str, *arguments: object) -> None:
        """Raises PluginError unless the function succeeds."""
        result = self._calls[name](*arguments)
        if result != 0:
            raise PluginError(f"{name} returned {result}")

    def init(self) -> int:
        """Initialises the plugin; returns the number of devices."""
        self.call("init", ctypes.cast(_log, _POINTER))
        count = _INT()
        self.call("devices", ctypes.byref(count))
        return count.value

    def done(self, request: ctypes.c_void_p) -> int | None:
        """Returns the bytes of a request that is done; None: not yet."""
        is_done, size = _INT(), _INT()
        self.call("test", request, ctypes.byref(is_done), ctypes.byref(size))
        return size.value if is_done.value else None


class Connection:
    """A sender and a receiver between this rank and the other, over a device."""

    def __init__(self, net: Net, device: int, swap: Callable[[bytes], bytes]) -> None:
        self._net = net
        handle = ctypes.create_string_buffer(HANDLE_BYTES)
        listener, self._sender, self._receiver = _POINTER(), _POINTER(), _POINTER()
        net.call("listen", device, handle, ctypes.byref(listener))
        peer = ctypes.create_string_buffer(swap(handle.raw), HANDLE_BYTES)
        deadline = time.monotonic() + START_S
        while self._sender.value is None or self._receiver.value is None:
            if self._sender.value is None:
                net.call("connect", device, peer, ctypes.byref(self._sender), None)
            if self._receiver.value is None:
                net.call("accept", listener, ctypes.byref(self._receiver), None)
            if time.monotonic() > deadline:
                raise PluginError(f"device {device}: no connection within {START_S:g} s")
            time.sleep(0.001)
        net.call("close_listen", listener)
        self._out = ctypes.create_string_buffer(MESSAGE_BYTES)
        self._in = ctypes.create_string_buffer(MESSAGE_BYTES)
        self._out_memory = self._register(self._sender, self._out)
        self._in_memory = self._register(self._receiver, self._in)

    def _register(self, end: ctypes.c_void_p, memory: ctypes.Array[ctypes.c_char]) -> _POINTER:
        made = _POINTER()
        self._net.call(
            "register_memory", end, memory, MESSAGE_BYTES, HOST_MEMORY, ctypes.byref(made)
        )
        return made

    def exchange(self, message: bytes) -> bytes:
        """Sends a message to the other rank, and returns the message of the other rank."""
        ctypes.memmove(self._out, message, len(message))
        sending, receiving = _POINTER(), _POINTER()
        sent, received = False, None
        while not sent or received is None:
            if receiving.value is None:
                self._post(receiving)
            if sending.value is None:
                self._send(len(message), sending)
            if receiving.value is not None and received is None:
                received = self._net.done(receiving)
            if sending.value is not None and not sent:
                sent = self._net.done(sending) is not None
            time.sleep(POLL_S)
        return self._in.raw[:received]

    def _post(self, request: ctypes.c_void_p) -> None:
        data = (_POINTER * 1)(ctypes.addressof(self._in))
        memory = (_POINTER * 1)(self._in_memory.value)
        size, tag = (_INT * 1)(MESSAGE_BYTES), (_INT * 1)(0)
        place = ctypes.byref(request)
        self._net.call("receive", self._receiver, 1, data, size, tag, memory, place)

    def _send(self, count: int, request: ctypes.c_void_p) -> None:
        place = ctypes.byref(request)
        self._net.call("send", self._sender, self._out, count, 0, self._out_memory, place)

    def close(self) -> None:
        self._net.call("deregister_memory", self._sender, self._out_memory)
        self._net.call("deregister_memory", self._receiver, self._in_memory)
        self._net.call("close_send", self._sender)
        self._net.call("close_receive", self._receiver)


def say(text: str) -> None:
    os.write(1, text.encode() + b"\n")


def name_thread(name: bytes) -> None:
    """Names the calling thread; 15 bytes at most."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name, 0, 0, 0)


def bootstrap(rank: int, address: str) -> socket.socket:
    """Returns a connection between both ranks."""
    if rank == 0:
        with socket.create_server((address, BOOTSTRAP_PORT)) as server:
            server.settimeout(START_S)
            return server.accept()[0]
    deadline = time.monotonic() + START_S
    while True:
        try:
            return socket.create_connection((address, BOOTSTRAP_PORT), timeout=START_S)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def swapped(peer: socket.socket, data: bytes) -> bytes:
    """Sends data to the other rank, and returns as many bytes of the other rank."""
    peer.settimeout(START_S)
    peer.sendall(data)
    found = b""
    while len(found) < len(data):
        more = peer.recv(len(data) - len(found))
        if not more:
            raise PluginError("the other rank has ended")
        found += more
    return found


def message(rank: int, number: int, last: bool) -> bytes:
    """Returns the message of a rank in a round; the first byte tells the last round."""
    word = f"{rank}/{number};".encode()
    size = 1 + number * 7919 % MESSAGE_BYTES
    return (bytes([last]) + word * (size // len(word) + 1))[:size]


def play(connections: list[Connection], rank: int) -> int:
    """Exchanges messages until rank 0 finds the file `stop`; returns the number of rounds."""
    number, told, last = 0, 0.0, False
    while not last:
        last = rank == 0 and Path("stop").exists()
        connection = connections[number % len(connections)]
        found = connection.exchange(message(rank, number, last))
        theirs = found[:1] == b"\x01"
        if found != message(1 - rank, number, theirs):
            raise PluginError(f"round {number}: wrong bytes")
        last = last or theirs
        number += 1
        if time.monotonic() - told > 0.1:
            told = time.monotonic()
            say(f"rounds {number}")
        time.sleep(0.001)
    return number


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nnodes", type=int, choices=[2], required=True)
    parser.add_argument("--node-rank", type=int, choices=[0, 1], required=True)
    parser.add_argument("--master-addr", required=True)
    parser.add_argument("script", nargs="?")
    options = parser.parse_args()
    net = Net(os.environ["NCCL_NET_PLUGIN"])
    if net.name != os.environ["NCCL_NET"]:
        raise PluginError(f"the plugin is {net.name!r}, and NCCL_NET {os.environ['NCCL_NET']!r}")
    devices = net.init()
    name_thread(SERVICE)
    say(f"devices {devices}")
    with bootstrap(options.node_rank, options.master_addr) as peer:
        connections = [
            Connection(net, device, lambda data: swapped(peer, data)) for device in range(devices)
        ]
        rounds = play(connections, options.node_rank)
        swapped(peer, b"1")  # both ranks have all messages
        for connection in connections:
            connection.close()
        swapped(peer, b"2")
    say(f"done {rounds}")


if __name__ == "__main__":
    status = 1
    try:
        main()
        status = 0
    except (PluginError, OSError) as error:
        say(f"{type(error).__name__}: {error}")
    # Threads of the plugin call the logger, so the interpreter does not take itself apart.
    os._exit(status)
