"""A job of two ranks that talk over ZMQ, gloo and a store; rank 0 measures the round trips.

Usage: ``talk.py rounds`` or ``talk.py groups COUNT``. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
come from the environment. ``R2SERVE_TALK_ADDRESS`` is the address of rank 0 for its ZMQ socket;
``127.x.y.z`` has mirrors at the other node. Rank 0 obeys lines on standard input, and prints lines
of JSON:

``mark NAME``: percentiles of the round trips since the mark before, in ms, by kind.
``go``: makes COUNT groups, each with a first all-reduce.
``end``: ends both ranks.
"""

from __future__ import annotations

import json
import math
import os
import select
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import zmq

from r2serve.relay.client import Carried, PortTakenError

ADDRESS = "R2SERVE_TALK_ADDRESS"
KINDS = ("zmq", "gloo", "store", "round")
"""Kinds of round trips; a round has one of each, and a further all-reduce."""
MESSAGE_BYTES = 500
PAUSE_S = 0.002
ATTEMPTS = 16
KEYS = 8
TIMEOUT = timedelta(minutes=30)


def say(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


class Marks:
    """Round trips of a kind since the last mark, in ns."""

    def __init__(self) -> None:
        self._ns: dict[str, list[float]] = {kind: [] for kind in KINDS}

    def add(self, kind: str, ns: float) -> None:
        self._ns[kind].append(ns)

    def take(self, name: str) -> dict[str, Any]:
        found = {kind: summary(values) for kind, values in self._ns.items()}
        for values in self._ns.values():
            values.clear()
        return {"mark": name, **found}


def summary(ns: Sequence[float]) -> dict[str, float] | None:
    """Returns percentiles of round trips, in ms; None without a round trip."""
    if not ns:
        return None
    ordered = sorted(ns)

    def at(percent: float) -> float:
        return round(ordered[math.ceil(len(ordered) * percent / 100) - 1] / 1e6, 3)

    return {"count": len(ordered), "p50": at(50), "p99": at(99), "worst": at(100)}


def listen(context: zmq.Context[Any], address: str) -> tuple[zmq.Socket[Any], str]:
    """Returns a socket that the other node reaches, and its endpoint.

    Raises:
        PortTakenError: several ports in a row are taken on the other node.
    """
    carried = Carried.here()
    for attempt in range(ATTEMPTS):
        pair = context.socket(zmq.PAIR)
        pair.bind(f"tcp://{address}:*")
        endpoint = pair.getsockopt_string(zmq.LAST_ENDPOINT)
        try:
            if carried is not None:
                carried.sync()
        except PortTakenError:
            pair.close(linger=0)
            if attempt + 1 == ATTEMPTS:
                raise
        else:
            return pair, endpoint
    raise AssertionError("unreachable")


def echo(endpoint: str) -> None:
    """Sends each message back; the empty message is the last."""
    pair: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    pair.connect(endpoint)
    while message := pair.recv():
        pair.send(message)
    pair.close()


class Asker:
    """Sends messages to :func:`echo`, and checks the answers."""

    def __init__(self, pair: zmq.Socket[Any]) -> None:
        self._pair = pair
        self._poller = zmq.Poller()
        self._poller.register(pair, zmq.POLLIN)
        # ZMQ connects again after a reset, and waits for the lost message without end.
        self._monitor = pair.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._poller.register(self._monitor, zmq.POLLIN)

    def ask(self, number: int) -> None:
        """Raises RuntimeError for another answer, and after the end of the connection."""
        message = (number.to_bytes(4, "big") * MESSAGE_BYTES)[:MESSAGE_BYTES]
        self._pair.send(message)
        if self._monitor in dict(self._poller.poll()):
            raise RuntimeError(f"round {number}: the connection of ZMQ has ended")
        answer = self._pair.recv()
        if answer != message:
            raise RuntimeError(f"round {number}: ZMQ answers {len(answer)} other bytes")

    def end(self) -> None:
        self._pair.send(b"")


def add_up(number: int, rest: float) -> float:
    """All-reduces the number of the round and ``rest``; returns the sum of the latter."""
    values = torch.tensor([float(number), rest], dtype=torch.float64)
    dist.all_reduce(values)
    if values[0] != number * dist.get_world_size():
        raise RuntimeError(f"round {number}: gloo adds up to {values[0]}")
    return float(values[1])


def set_and_get(store: Any, number: int) -> float:
    """Returns the time of both, in ns; rank 1 calls this, because the store is at rank 0."""
    begun_ns = time.monotonic_ns()
    store.set(f"talk/{number % KEYS}", str(number))
    found = int(store.get(f"talk/{number % KEYS}"))
    if found != number:
        raise RuntimeError(f"round {number}: the store has {found}")
    return float(time.monotonic_ns() - begun_ns)


def order() -> str:
    """Returns the next line on standard input; empty: none is there."""
    if not select.select([sys.stdin], [], [], 0)[0]:
        return ""
    return sys.stdin.readline().strip() or "end"


def rounds() -> None:
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        pair, endpoint = listen(zmq.Context.instance(), os.environ[ADDRESS])
        store.set("talk/endpoint", endpoint)
        asker = Asker(pair)
    else:
        where = store.get("talk/endpoint").decode()
        threading.Thread(target=echo, args=(where,), daemon=True).start()
    marks, number, ends = Marks(), 0, False
    while not ends:
        said = order() if rank == 0 else ""
        if said.startswith("mark "):
            say(marks.take(said.removeprefix("mark ")))
        begun_ns = time.monotonic_ns()
        if rank == 0:
            asker.ask(number)
            marks.add("zmq", time.monotonic_ns() - begun_ns)
            store_ns = add_up(number, 0.0)
            together_ns = time.monotonic_ns()
        else:
            add_up(number, set_and_get(store, number))
        ends = add_up(number, float(said == "end")) > 0
        if rank == 0:
            now_ns = time.monotonic_ns()
            marks.add("gloo", now_ns - together_ns)
            marks.add("store", store_ns)
            marks.add("round", now_ns - begun_ns)
            time.sleep(PAUSE_S)
        number += 1
    if rank == 0:
        asker.end()
        say({"end": number})
    dist.barrier()  # rank 0 holds the store


def groups(count: int) -> None:
    """Makes groups in a row, after the line `go`; each has a first all-reduce."""
    rank = dist.get_rank()
    if rank == 0:
        sys.stdin.readline()
    dist.barrier()
    took_ns: list[float] = []
    for _ in range(count):
        begun_ns = time.monotonic_ns()
        group = dist.new_group(timeout=TIMEOUT)
        values = torch.ones(8)
        dist.all_reduce(values, group=group)
        if values[0] != dist.get_world_size():
            raise RuntimeError(f"group {len(took_ns)}: gloo adds up to {values[0]}")
        took_ns.append(time.monotonic_ns() - begun_ns)
    dist.barrier()
    if rank == 0:
        say({"groups": count, **(summary(took_ns) or {})})


def main() -> None:
    what, *rest = sys.argv[1:]
    dist.init_process_group("gloo", timeout=TIMEOUT)
    say({"ready": dist.get_rank()})
    if what == "rounds":
        rounds()
    else:
        groups(int(rest[0]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
