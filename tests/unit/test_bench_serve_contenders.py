"""The contenders of `r2serve bench serve`: their networks, preloads and supervisors."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from r2serve.bench.serve import contenders, networks
from r2serve.bench.serve.contenders import CONTENDERS


class PlayedNode:
    def __init__(self, index: int) -> None:
        self.index, self.rails = index, 2
        self.done: list[tuple[str, ...]] = []

    def rail_address(self, rail: int) -> str:
        return f"10.77.{rail + 1}.{self.index + 1}"

    def run(self, *argv: str) -> str:
        self.done.append(argv)
        return ""


class PlayedLab:
    rails = 2

    def __init__(self) -> None:
        self.nodes = [PlayedNode(index) for index in range(3)]


def test_birds_routes_go_over_all_rails() -> None:
    one, other = PlayedNode(0), PlayedNode(1)
    text = networks.bird_configuration(one, other)  # type: ignore[arg-type]
    assert "router id 10.78.0.1;" in text
    assert "route 10.78.0.2/32 via 10.77.1.2 bfd via 10.77.2.2 bfd;" in text


@pytest.mark.parametrize(
    ("network", "step", "said"),
    [
        (networks.Multipath(), "build", "no C\\+\\+ compiler"),
        (networks.VirtualAddress(), "begin", "package bird2"),
    ],
)
def test_a_missing_program_is_named(
    network: Any, step: str, said: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(networks.shutil, "which", lambda *_, **__: None)
    with pytest.raises(contenders.ServeError, match=said):
        getattr(network, step)(PlayedLab(), tmp_path)


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("CXX", sys.executable)  # Python does not compile C++
    with pytest.raises(contenders.ServeError, match="does not compile multipath"):
        networks.compile_preload(tmp_path)


SOCKETS = """
import socket, json
def protocol(s): return s.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL)
one, two = socket.socket(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
one.bind(("127.0.0.1", 0)); one.listen()
near = socket.create_connection(one.getsockname())
far, _ = one.accept()
far.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gloo does
print(json.dumps([protocol(s) for s in (one, near, far, two)]))
"""


def test_a_preloaded_program_has_mptcp_for_tcp(tmp_path: Path) -> None:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262):
            pass
    except OSError as error:
        pytest.skip(f"no MPTCP: {error}")
    done = subprocess.run(
        [sys.executable, "-c", SOCKETS],
        env={"LD_PRELOAD": str(networks.compile_preload(tmp_path))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [262, 262, 262, 17]


def test_only_nodes_that_serve_get_endpoints(tmp_path: Path) -> None:
    lab: Any = PlayedLab()
    networks.Multipath().build(lab, tmp_path)
    assert [len(node.done) for node in lab.nodes] == [2, 2, 0]
    assert lab.nodes[0].done[1][3:5] == ("add", "10.77.2.1")


class PlayedLoad:
    """Ends by itself after a number of looks, or when stopped."""

    streams, expected_requests, finished = 4, 4, 0

    def __init__(self, silent_s: float) -> None:
        self.silent_since, self.stopped = time.monotonic() - silent_s, False
        self.looks = 0

    @property
    def changed_at(self) -> float:
        return self.silent_since

    @changed_at.setter
    def changed_at(self, at: float) -> None:
        self.silent_since = at

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.silent_since

    def stop(self) -> None:
        self.stopped = True

    def finish(self, patience_s: float, watch: Any) -> str:
        while not self.stopped and self.looks < 3:
            self.looks += 1
            watch()
        return "lost" if self.stopped else "done"


class PlayedServer:
    def __init__(self, *, alive: bool = True) -> None:
        self.alive = alive

    def check_alive(self) -> None:
        if not self.alive:
            raise contenders.ServeError("node 1 ended")


class PlayedNetwork:
    def build(self, lab: Any, work: Path) -> dict[str, str]:
        return {"GLOO_SOCKET_IFNAME": "rail0"}


def place_of(name: str, tmp_path: Path, server: PlayedServer) -> Any:
    place: Any = contenders.ContenderServer(name, tmp_path, tmp_path, 1, lambda _: None)
    place._server = server
    place.restart = lambda: setattr(place, "_server", PlayedServer())
    return place


@pytest.mark.parametrize(
    ("name", "silent_s", "alive", "outcome_of_it", "restarts"),
    [
        ("restart", 6.0, True, "done", 1),
        ("restart", 0.0, False, "done", 1),
        ("restart", 0.0, True, "done", 0),
        ("gloo", 6.0, True, "done", 0),
        ("gloo", 0.0, False, "lost", 0),
    ],
)
def test_a_supervisor_restarts_a_hung_or_ended_server(
    name: str, silent_s: float, alive: bool, outcome_of_it: str, restarts: int, tmp_path: Path
) -> None:
    place = place_of(name, tmp_path, PlayedServer(alive=alive))
    load: Any = PlayedLoad(silent_s)
    assert place.finish(load, 20.0, lambda _: None) == outcome_of_it
    assert place.restarts == restarts


def test_a_supervisor_switches_to_the_unused_rail(tmp_path: Path) -> None:
    place: Any = contenders.ContenderServer("restart", tmp_path, tmp_path, 1, lambda _: None)
    started: list[str] = []

    class Started(PlayedServer):
        def stream(self, *_: Any) -> None: ...

    def start(plan: Any) -> PlayedServer:
        started.append(plan.settings["GLOO_SOCKET_IFNAME"])
        place.starts += 1
        place._server = Started()
        return place._server

    place.stop = lambda: setattr(place, "_server", None)
    place._start = start
    place.contender = replace(place.contender, network=PlayedNetwork())
    place.server(("warm", "up"))
    for _ in range(2):
        place.restart()
    place.restart()  # on rail 1 the server ends by itself, and starts again like the first time
    place._server.alive = False
    place.server(("warm", "up"))
    place.restart()
    assert [name.removeprefix("rail") for name in started] == ["0", "1", "0", "1", "0", "1"]


def test_a_supervisor_gives_up_after_a_number_of_restarts(tmp_path: Path) -> None:
    place = place_of("restart", tmp_path, PlayedServer(alive=False))
    place.restart = lambda: None
    load: Any = PlayedLoad(0.0)
    load.looks = -9
    assert place.finish(load, 20.0, lambda _: None) == "lost"
    assert place.restarts == contenders.MAX_RESTARTS


def test_the_rail_in_use_sends_most(tmp_path: Path) -> None:
    place: Any = contenders.ContenderServer("gloo", tmp_path, tmp_path, 1, lambda _: None)
    lab: Any = PlayedLab()
    sent = iter([[5, 5], [5, 5], [10, 400], [10, 90]])

    def links(*_: str) -> str:
        rails = [
            {"ifname": f"rail{rail}", "stats64": {"tx": {"bytes": count}}}
            for rail, count in enumerate(next(sent))
        ]
        return json.dumps([{"ifname": "lo", "stats64": {"tx": {"bytes": 10**9}}}, *rails])

    for node in lab.nodes:
        node.run = links
    place.lab = lab
    assert place.rail_in_use() == 1


def test_contenders_show_their_serve_command(tmp_path: Path) -> None:
    said = {
        name: contenders.ContenderServer(name, tmp_path, tmp_path, 1, lambda _: None).command
        for name in CONTENDERS
    }
    assert said["r2ccl"].endswith("--distributed-backend r2ccl")
    assert said["r2ccl-rails"] == f"R2CCL_FALLBACK=off {said['r2ccl']}"
    serve = {
        name: contenders.ContenderServer(
            name, tmp_path, tmp_path, 1, lambda _: None, engine="sglang", management_rail=0
        ).command
        for name in ("r2ccl", "gloo")
    }
    assert serve["gloo"] == "sglang serve tiny-llama --tensor-parallel-size 2 --nnodes 2"
    assert serve["r2ccl"] == (
        "GLOO_SOCKET_IFNAME=rail0 R2CCL_MANAGEMENT= R2CCL_RAILS=rail0,rail1 "
        f"{serve['gloo']} --distributed-backend r2ccl"
    )
    stock = [text for name, text in said.items() if not name.startswith("r2ccl")]
    assert len(stock) == 4
    assert all("r2ccl" not in text for text in stock)
    place: Any = contenders.ContenderServer("mptcp", tmp_path, tmp_path, 1, lambda _: None)
    place._plan = replace(place._plan, settings={"LD_PRELOAD": str(tmp_path / "multipath.so")})
    # the command contains no path of this machine
    assert place.command.startswith("LD_PRELOAD=multipath.so vllm")
