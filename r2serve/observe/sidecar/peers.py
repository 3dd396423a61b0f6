"""Polls the sidecars of other nodes once per second."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from r2serve.observe.sidecar.polls import said
from r2serve.observe.sidecar.schema import MemberView, NodeView

_LOG = logging.getLogger("r2serve.sidecar")

ASK_S = 1.0
TIMEOUT_S = 2.0
MAX_BYTES = 4 << 20
MAX_PEERS = 256


class PeerError(ValueError):
    """The address or the answer of a peer is invalid; the text names the reason."""


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
    """The sidecars of other nodes, with the last answer of each."""

    def __init__(
        self, urls: Sequence[str], read_token: str | None = None, authorities: Path | None = None
    ) -> None:
        """urls: at most MAX_PEERS addresses. read_token: sent to every peer.

        authorities: file with the certificates of the peers' authorities; None: the system's.

        Raises:
            PeerError: an address is invalid, the number is above MAX_PEERS, or the file is
                unusable.
        """
        self._headers = {"Authorization": f"Bearer {read_token}"} if read_token else {}
        try:
            self._verify = ssl.create_default_context(cafile=authorities)
        except OSError as error:  # an SSLError, too
            raise PeerError(f"peers: {authorities}: {error}") from error
        if len(urls) > MAX_PEERS:
            raise PeerError(f"peers: {len(urls)} addresses given: must be at most {MAX_PEERS}")
        self._peers = [_Peer(_checked(url)) for url in dict.fromkeys(urls)]

    async def poll(self) -> None:
        """Asks all sidecars every ASK_S until cancelled; raises what concerns no single peer."""
        if not self._peers:
            await asyncio.Future()  # nothing to ask, ever
        # Proxies of the environment are for other traffic; sidecars reach each other directly.
        async with httpx.AsyncClient(
            timeout=TIMEOUT_S,
            follow_redirects=False,
            trust_env=False,
            headers=self._headers,
            verify=self._verify,
        ) as client:
            while True:
                await asyncio.gather(*(self._ask(client, peer) for peer in self._peers))
                await asyncio.sleep(ASK_S)

    def failed(self, why: str) -> None:
        """Shows at every peer why no sidecar is asked, until the peer answers."""
        for peer in self._peers:
            peer.error = why

    def views(self) -> list[MemberView]:
        return [peer.view() for peer in self._peers]

    async def _ask(self, client: httpx.AsyncClient, peer: _Peer) -> None:
        before = peer.error
        try:
            async with asyncio.timeout(TIMEOUT_S):
                peer.node = NodeView.model_validate_json(await _fetch(client, peer.url))
            peer.answered, peer.error = datetime.now(UTC), ""
        except Exception as error:  # noqa: BLE001  polling of other peers must go on
            peer.error = said(error)  # parts of the text come from whatever listens there
        if bool(before) != bool(peer.error):
            _LOG.warning("peer sidecar %s: %s", peer.url, peer.error or "answers")


async def _fetch(client: httpx.AsyncClient, url: str) -> bytes:
    data = b""
    async with client.stream("GET", f"{url}/v1/node") as answer:
        if answer.status_code != 200:
            raise PeerError(f"HTTP status {answer.status_code}: must be 200")
        async for part in answer.aiter_bytes():
            data += part
            if len(data) > MAX_BYTES:
                raise PeerError(f"the answer is longer than {MAX_BYTES} bytes")
    return data


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        usable = usable and not (parts.path.strip("/") or parts.query or parts.username)
    except ValueError:
        usable = False
    if not usable:
        raise PeerError(f"peers: {url!r} must be a sidecar's address, e.g. http://node1:8199")
    return f"{parts.scheme}://{parts.netloc}"
