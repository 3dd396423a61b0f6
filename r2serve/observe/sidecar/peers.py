"""The sidecars of other nodes, each asked once a second."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import urlsplit

import httpx

from r2serve.observe.sidecar.schema import MemberView, NodeView

_LOG = logging.getLogger("r2serve.sidecar")

ASK_S = 1.0
TIMEOUT_S = 2.0
MAX_BYTES = 4 << 20
MAX_PEERS = 256


class PeerError(ValueError):
    """The address of a peer cannot be; the text says why."""


@dataclass
class _Peer:
    url: str
    error: str = "not asked yet"
    answered: datetime | None = None
    node: NodeView | None = None

    def view(self) -> MemberView:
        return MemberView(
            url=self.url,
            answers=not self.error,
            error=self.error,
            asked=self.answered,
            node=self.node,
        )


class Peers:
    """The sidecars of other nodes, as they answered last."""

    def __init__(self, urls: Sequence[str]) -> None:
        """Raises PeerError where a URL is none of a sidecar."""
        if len(urls) > MAX_PEERS:
            raise PeerError(f"peers: {len(urls)} are more than {MAX_PEERS}")
        self._peers = [_Peer(_checked(url)) for url in dict.fromkeys(urls)]

    async def follow(self) -> None:
        """Ask all of them again and again, for ever."""
        if not self._peers:
            return
        async with httpx.AsyncClient(timeout=TIMEOUT_S, follow_redirects=False) as client:
            while True:
                await asyncio.gather(*(self._ask(client, peer) for peer in self._peers))
                await asyncio.sleep(ASK_S)

    def views(self) -> list[MemberView]:
        return [peer.view() for peer in self._peers]

    async def _ask(self, client: httpx.AsyncClient, peer: _Peer) -> None:
        before = peer.error
        try:
            async with asyncio.timeout(TIMEOUT_S):
                peer.node = NodeView.model_validate_json(await _fetch(client, peer.url))
            peer.answered, peer.error = datetime.now(UTC), ""
        except Exception as error:  # noqa: BLE001  whatever it is, the other peers are asked
            peer.error = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        if bool(before) != bool(peer.error):
            _LOG.warning("peer %s %s", peer.url, peer.error or "answers")


async def _fetch(client: httpx.AsyncClient, url: str) -> bytes:
    data = b""
    async with client.stream("GET", f"{url}/v1/node") as answer:
        if answer.status_code != 200:
            raise PeerError(f"it answers {answer.status_code}")
        async for part in answer.aiter_bytes():
            data += part
            if len(data) > MAX_BYTES:
                raise PeerError(f"its answer is longer than {MAX_BYTES} bytes")
    return data


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        usable = usable and not (parts.path.strip("/") or parts.query or parts.username)
    except ValueError:
        usable = False
    if not usable:
        raise PeerError(f"peers: {url!r} must be the address of a sidecar, as http://node1:8199")
    return f"{parts.scheme}://{parts.netloc}"
