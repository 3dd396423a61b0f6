"""The benchmark of a flood: its order, its medians and its limits, and a flood of a moment."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
from rich.console import Console

from r2serve.bench.flood import measure
from r2serve.bench.flood.measure import Pair
from r2serve.bench.flood.worker import KINDS, flood


def pair(kind: str = "hold", lines: float = 1, **rails: float) -> Pair:
    elsewhere = {"p50_us": 100.0, "p99_us": 200.0, "max_us": 900.0, "connections": 5000.0}
    return Pair(kind, elsewhere | {"lines": lines} | rails, elsewhere | {"lines": 0.0})


def test_places_take_turns() -> None:
    orders = list(measure.turns(4))
    assert [order[0] for order in orders] == ["rails", "elsewhere"] * 2
    assert all(sorted(order) == ["elsewhere", "rails"] for order in orders)


def test_the_summary_has_medians_of_the_pairs_of_each_kind() -> None:
    pairs = [pair(p50_us=value) for value in (100.0, 105.0, 400.0)]
    first, second = measure.summary([*pairs, pair("garbage")], 10.0)
    assert (first["kind"], first["pairs"], first["p50"]) == ("hold", 3, 1.05)
    assert (first["p50_us rails"], first["p50_us elsewhere"]) == (105.0, 100.0)
    assert (second["kind"], second["pairs"], second["p50"]) == ("garbage", 1, 1.0)


@pytest.mark.parametrize(
    ("found", "seconds", "met"),
    [
        ({}, 10.0, True),
        ({"p50_us": 109.0, "p99_us": 399.0}, 10.0, True),
        ({"p50_us": 111.0}, 10.0, False),
        ({"p99_us": 401.0}, 10.0, False),
        ({"lines": 2.0}, 10.0, False),
        ({"lines": 1.0}, 5.0, False),
    ],
)
def test_limits(found: dict[str, Any], seconds: float, met: bool) -> None:
    [row] = measure.summary([pair(**found)], seconds)
    assert row["met"] is met


def test_the_table_has_both_places() -> None:
    console = Console(record=True, width=120)
    measure.show(measure.summary([pair(p50_us=105.0)], 10.0), console)
    text = console.export_text()
    assert "105 / 100" in text
    assert "1.05x" in text


@pytest.mark.parametrize("kind", KINDS)
def test_a_flood_connects_to_every_address(kind: str) -> None:
    arrived = [threading.Event(), threading.Event()]

    def serve(server: socket.socket, event: threading.Event) -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            event.set()
            client.close()

    servers = [socket.create_server(("127.0.0.1", 0), backlog=128) for _ in arrived]
    for server, event in zip(servers, arrived, strict=True):
        threading.Thread(target=serve, args=(server, event), daemon=True).start()
    connected = flood([server.getsockname() for server in servers], kind, 0.5)
    arrived_everywhere = all(event.wait(60) for event in arrived)  # a thread may come late
    for server in servers:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
    assert connected > 0
    assert arrived_everywhere
