"""What a stranger gets from the sidecar: foreign names of the host, no token, endless requests."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import socket
import ssl
import stat
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import click
import pytest
from fastapi.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send
from test_sidecar import GETS
from test_sidecar_streams import Server
from timely import timely

from r2serve.observe.sidecar import app as sidecar
from r2serve.observe.sidecar import middleware, peers, server
from r2serve.observe.sidecar.auth import PROBES
from r2serve.observe.watch import Watch

pytestmark = pytest.mark.slow

TOKEN = "0123456789abcdef"
READ_TOKEN = "fedcba9876543210"


def client_of(folder: Path, **options: Any) -> TestClient:
    return TestClient(sidecar.make_app(Watch(folder), **options), base_url="http://localhost")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Server]:
    made = Server(Watch(tmp_path))
    yield made
    made.close()


# ---- names of the host ----


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8199", "10.1.2.3", "[::1]:8199", "LOCALHOST:81", "n1.job.example", "node1:8199"],
)
def test_a_request_for_this_host_is_served(tmp_path: Path, host: str) -> None:
    with client_of(tmp_path, hosts=["*.job.example", "node1"]) as client:
        assert client.get("/v1/rails", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example:8199", "job.example.evil.example", "127.0.0.1.x"])
def test_a_page_that_rebinds_its_name_reads_nothing(tmp_path: Path, host: str) -> None:
    """A page whose name resolves to this host sends its own name as Host."""
    with client_of(tmp_path, hosts=["*.job.example"]) as client:
        for path in (*GETS, "/readyz", "/", "/static/dashboard.js"):
            answer = client.get(path, headers={"Host": host})
            assert answer.status_code == 400, path
            assert "--allowed-host" in answer.json()["detail"]


def test_the_hosts_own_name_is_allowed(tmp_path: Path) -> None:
    with client_of(tmp_path) as client:
        own = {"Host": f"{socket.gethostname()}:8199"}
        assert client.get("/v1/rails", headers=own).status_code == 200
    with pytest.raises(ValueError, match=r"allowed host 'a\.\*'"):
        sidecar.make_app(Watch(tmp_path), hosts=["a.*"])


# ---- tokens ----


def basic(password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"any:{password}".encode()).decode()}


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_with_a_read_token_strangers_see_the_probes_alone(tmp_path: Path) -> None:
    with client_of(tmp_path, token=TOKEN, read_token=READ_TOKEN) as client:
        for path in (*GETS, "/readyz", "/", "/static/dashboard.js", "/openapi.json", "/nowhere"):
            expected = path in PROBES
            for headers in ({}, bearer("x" * 16), basic("x" * 16)):
                assert (client.get(path, headers=headers).status_code != 401) == expected, path
            lower = {"authorization": f"bearer {READ_TOKEN}"}  # a scheme has no case (RFC 9110)
            for headers in (
                lower,
                bearer(READ_TOKEN),
                bearer(TOKEN),
                basic(READ_TOKEN),
                basic(TOKEN),
            ):
                assert client.get(path, headers=headers).status_code in (200, 404, 503), path
        asked = client.get("/").headers.get_list("www-authenticate")
        assert asked == ["Bearer", 'Basic realm="r2serve sidecar"']  # a browser asks its user


def test_a_token_for_reading_changes_nothing(tmp_path: Path) -> None:
    with client_of(tmp_path, token=TOKEN, read_token=READ_TOKEN) as client:
        for headers in (bearer(READ_TOKEN), basic(READ_TOKEN), basic(TOKEN)):
            assert client.post("/v1/drills", json={}, headers=headers).status_code == 401
        assert client.post("/v1/drills", json={}, headers=bearer(TOKEN)).status_code == 422


def test_a_sidecar_sends_its_read_token_to_its_peers(tmp_path: Path) -> None:
    heard: list[str | None] = []

    class Peer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append(self.headers["Authorization"])
            self.send_error(503)

        def log_message(self, *_: object) -> None:
            """Writes no log."""

    peer = ThreadingHTTPServer(("127.0.0.1", 0), Peer)
    threading.Thread(target=peer.serve_forever, daemon=True).start()
    urls = [f"127.0.0.1:{peer.server_port}"]
    try:
        with client_of(tmp_path, token=TOKEN, read_token=READ_TOKEN, peers=urls):
            timely(lambda: heard, "the sidecar asks its peer")
    finally:
        peer.shutdown()
        peer.server_close()
    assert set(heard) == {f"Bearer {READ_TOKEN}"}


def test_unusable_certificates_of_peers_are_named(tmp_path: Path) -> None:
    with pytest.raises(peers.PeerError, match="nowhere"):
        peers.Peers((), authorities=tmp_path / "nowhere")


# ---- headers ----


def test_every_answer_has_the_security_headers(tmp_path: Path) -> None:
    with client_of(tmp_path, read_token=READ_TOKEN) as client:
        for path in ("/", "/static/dashboard.js", "/v1/rails", "/nowhere", "/readyz"):
            for headers in (bearer(READ_TOKEN), {}, {"Host": "evil.example"}):
                said = client.get(path, headers=headers).headers
                assert said["x-content-type-options"] == "nosniff"
                assert said["x-frame-options"] == "DENY"
                assert said["cache-control"] == "no-store"
                policy = said["content-security-policy"]
                assert "frame-ancestors 'none'" in policy
                assert "base-uri 'none'" in policy
                assert ("default-src 'self'" in policy) == (
                    path == "/" and headers == bearer(READ_TOKEN)
                )


def test_long_answers_are_compressed_on_request(tmp_path: Path) -> None:
    with client_of(tmp_path) as client:
        plain = client.get("/openapi.json", headers={"Accept-Encoding": "identity"})
        packed = client.get("/openapi.json", headers={"Accept-Encoding": "gzip"})
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert int(packed.headers["content-length"]) < len(plain.content) / 2
    assert packed.json() == plain.json()


@pytest.mark.parametrize("path", [middleware.STREAM, "/v1/events"])
def test_a_stream_is_never_compressed(path: str) -> None:
    """Older releases of starlette keep events until a buffer is full."""
    senders: list[Send] = []

    async def answering(scope: Scope, receive: Receive, send: Send) -> None:
        senders.append(send)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        """Sends nowhere."""

    scope = {"type": "http", "path": path, "headers": [(b"accept-encoding", b"gzip")]}
    asyncio.run(middleware.Compression(answering)(scope, receive, send))
    assert (senders == [send]) == (path == middleware.STREAM)


def test_head_is_answered_like_get_without_a_body(tmp_path: Path) -> None:
    """Load balancers check with HEAD: an answer 405 would take the sidecar out."""
    with client_of(tmp_path) as client:
        for path in (*GETS, "/readyz", "/"):
            there, here = client.head(path), client.get(path)
            assert there.status_code == here.status_code, path
            assert there.content == b""
            assert there.headers["content-type"] == here.headers["content-type"]


# ---- limits ----


def test_a_long_body_is_refused_unread(tmp_path: Path) -> None:
    """A body that is read whole costs about twice its size in memory."""
    longest = middleware.MAX_BODY_BYTES
    with client_of(tmp_path, token=TOKEN) as client:
        for sent in (b"x" * (longest + 1), iter([b"x" * longest, b"x"])):
            answer = client.post("/v1/drills", content=sent, headers=bearer(TOKEN))
            assert answer.status_code == 413
            assert str(longest) in answer.json()["detail"]
        fits = client.post("/v1/drills", content=b" " * longest, headers=bearer(TOKEN))
        assert fits.status_code == 422


def raw(port: int, sent: bytes) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), timeout=120)
    made.sendall(sent)
    return made


def rest_of(connection: socket.socket) -> bytes:
    """Reads until the server ends the connection."""
    received = b""
    with connection, contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            received += part
    return received


def test_a_body_that_does_not_come_ends_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "BODY_S", 0.2)
    made = Server(Watch(tmp_path), token=TOKEN)
    try:
        head = f"POST /v1/drills HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
        told = head + "Content-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        assert rest_of(raw(made.port, told.encode())).startswith(b"HTTP/1.1 408")
    finally:
        made.close()


def test_a_request_that_stays_half_sent_ends(
    served: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a time limit, such connections would take all descriptors."""
    monkeypatch.setattr(server, "REQUEST_S", 0.1)
    whole = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for sent in (b"", b"GET /li", whole + b"GET /li"):
        answer = rest_of(raw(served.port, sent))
        assert answer.startswith(b"HTTP/1.1 200") == (whole in sent)


def test_a_head_without_an_end_is_refused(served: Server) -> None:
    sent = b"GET /livez HTTP/1.1\r\nX: " + b"x" * (server.MAX_HEAD_BYTES + 1)
    assert rest_of(raw(served.port, sent)).startswith(b"HTTP/1.1 4")


def test_idle_connections_make_room_for_a_new_one(
    served: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 3)
    with contextlib.ExitStack() as held:
        idle = [held.enter_context(raw(served.port, b"GET /li")) for _ in range(6)]
        asked = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        assert rest_of(raw(served.port, asked)).endswith(b"ok\n")
        assert rest_of(idle[0]) == b""


class Pipe:
    """A transport whose end takes effect in the loop's next turn."""

    def __init__(self) -> None:
        self.aborted = False

    def get_extra_info(self, _name: str) -> None:
        return None

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted


def test_connections_of_one_turn_of_the_loop_are_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 3)
    serving = server.server_of(sidecar.make_app(Watch(tmp_path)))
    pipes = [Pipe() for _ in range(10)]

    async def flood() -> None:
        for pipe in pipes:
            made = server.Connection(
                serving.config, serving.server_state, {}, asyncio.get_running_loop()
            )
            made.connection_made(pipe)

    asyncio.run(flood())
    assert [pipe.aborted for pipe in pipes] == [True] * 7 + [False] * 3


def test_an_answer_without_an_end_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "ANSWER_S", 0.1)

    async def silent(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return
        await receive()
        await receive()  # returns when the client or the server ends the connection

    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving: Any = server.server_of(silent)  # type: ignore[arg-type]
        thread = threading.Thread(target=serving.run, args=([listening],))
        thread.start()
        try:
            port = listening.getsockname()[1]
            assert rest_of(raw(port, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")) == b""
        finally:
            serving.should_exit = True
            thread.join()


# ---- unix sockets and TLS ----


def test_a_unix_socket_is_for_this_user_and_replaces_a_leftover(tmp_path: Path) -> None:
    path = tmp_path / "s"
    server.bound_to(path).close()  # the file stays, as after SIGKILL
    with server.bound_to(path) as listening:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert server.place_of(listening, tls=False) == f"unix:{path}"
        with pytest.raises(click.ClickException, match="another process listens"):
            server.bound_to(path)
    file = tmp_path / "file"
    file.write_text("kept")
    with pytest.raises(click.ClickException, match="file"):
        server.bound_to(file)
    assert file.read_text() == "kept"


def test_the_sidecar_answers_on_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "s"
    made = Server(Watch(tmp_path), listening=server.bound_to(path))
    try:
        with socket.socket(socket.AF_UNIX) as talk:
            talk.connect(str(path))
            talk.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
            assert rest_of(talk).endswith(b"ok\n")
    finally:
        made.close()


def test_an_unusable_certificate_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        server.server_of(
            sidecar.make_app(Watch(tmp_path)), certificate=tmp_path / "c", key=tmp_path / "k"
        )


@pytest.fixture
def secured(tmp_path: Path, tls_files: tuple[Path, Path]) -> Iterator[Server]:
    certificate, key = tls_files
    made = Server(Watch(tmp_path), certificate=certificate, key=key)
    yield made
    made.close()


def asked_over_tls(port: int, certificate: Path) -> bytes:
    context = ssl.create_default_context(cafile=certificate)
    plain = socket.create_connection(("127.0.0.1", port), timeout=120)
    with context.wrap_socket(plain, server_hostname="127.0.0.1") as talk:
        talk.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
        return talk.recv(65536)


def test_the_sidecar_serves_over_tls(secured: Server, tls_files: tuple[Path, Path]) -> None:
    assert asked_over_tls(secured.port, tls_files[0]).startswith(b"HTTP/1.1 200")
    assert server.place_of(secured.socket, tls=True) == f"https://127.0.0.1:{secured.port}"


def test_handshakes_make_room_for_a_new_connection(
    secured: Server, tls_files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvicorn's own handshakes may take 60 s, and no limit counts them."""
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(server, "REQUEST_S", 600.0)
    with contextlib.ExitStack() as held:
        silent = [held.enter_context(raw(secured.port, b"\x16")) for _ in range(6)]
        assert asked_over_tls(secured.port, tls_files[0]).startswith(b"HTTP/1.1 200")
        silent[0].settimeout(30)
        assert rest_of(silent[0]) == b""


@pytest.mark.parametrize("sent", [b"", b"GET /livez HTTP/1.0\r\n\r\n"])
def test_a_handshake_without_an_end_and_a_failed_one_leave_nothing(
    sent: bytes, secured: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REQUEST_S", 0.1)
    silent = raw(secured.port, sent)
    silent.settimeout(30)
    assert not rest_of(silent).startswith(b"HTTP")
    timely(lambda: not secured.connections, "the end of the connection in the server")


@pytest.fixture
def tls_files(tmp_path: Path) -> tuple[Path, Path]:
    """Makes a certificate of 127.0.0.1 that is its own authority, and its key."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "sidecar")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    certificate, private = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return certificate, private
