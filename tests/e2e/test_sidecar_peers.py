"""Sidecars of several nodes joined into a single view, with peers that do not answer."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sidecars import SETTLED_S, Sidecar
from timely import timely


@pytest.fixture
def start(tmp_path: Path, free_ports: Any) -> Iterator[Callable[..., Sidecar]]:
    made: list[Sidecar] = []

    def start(*options: str) -> Sidecar:
        folder = tmp_path / f"node{len(made)}"
        folder.mkdir()
        made.append(Sidecar(folder, free_ports(1)[0], *options))
        return made[-1]

    yield start
    for sidecar in made:
        sidecar.kill()


def members(sidecar: Sidecar) -> dict[str, Any]:
    return {member["url"]: member for member in sidecar.ask("/v1/cluster")["members"]}


def wait_for(sidecar: Sidecar, done: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    def met() -> dict[str, Any] | None:
        found = members(sidecar)
        return found if done(found) else None

    found = timely(met, "the expected members", SETTLED_S)
    assert found is not None
    return found


class Nonsense(http.server.BaseHTTPRequestHandler):
    """A server that is not a sidecar, on the address of a peer."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"health": 7}')

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


@pytest.mark.timeout(300)
def test_several_nodes_are_one_view(start: Callable[..., Sidecar], free_ports: Any) -> None:
    stranger = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Nonsense)
    threading.Thread(target=stranger.serve_forever, daemon=True).start()
    other = start()
    (nobody,) = free_ports(1)
    urls = [f"127.0.0.1:{port}" for port in (other.port, nobody, stranger.server_port)]
    sidecar = start("--peers", ",".join(urls))
    here, there, dead, odd = ("", *(f"http://{url}" for url in urls))
    found = wait_for(
        sidecar,
        lambda found: (
            found[there]["answers"]
            and "Validation" in found[odd]["error"]
            and "ConnectError" in found[dead]["error"]
        ),
    )
    assert list(found) == [here, there, dead, odd]
    assert found[there]["node"]["health"]["status"] == "no-engine"
    assert not found[dead]["answers"]
    assert found[dead]["node"] is None
    assert sidecar.metric("r2serve_peer_up", peer=there) == 1
    assert sidecar.metric("r2serve_peer_up", peer=dead) == 0

    other.kill()
    found = wait_for(sidecar, lambda found: not found[there]["answers"])
    assert found[there]["node"]["health"]["status"] == "no-engine"  # the last answer
    other.start()
    wait_for(sidecar, lambda found: found[there]["answers"])
    stranger.shutdown()


@pytest.mark.parametrize("peers", ["ftp://a:1", "http://a/path", "http://a:x", "a:0"])
def test_an_invalid_peer_address_is_refused_at_start(tmp_path: Path, peers: str) -> None:
    code = "from r2serve.cli import main; main()"
    words = ["sidecar", "--port", "0", "--journal-dir", str(tmp_path), "--peers", peers]
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert "must be a sidecar's address" in done.stderr
