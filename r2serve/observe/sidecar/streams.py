"""The open streams of events, at most MAX_STREAMS: no client can keep others from a stream."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

MAX_STREAMS = 64


@dataclass(eq=False)
class OpenStream:
    """A stream of a client; ``over``: the stream had to make room for a newer one."""

    client: str
    over: bool = False


class Streams:
    """The open streams, oldest first."""

    def __init__(self) -> None:
        self._open: list[OpenStream] = []

    def __len__(self) -> int:
        return len(self._open)

    def add(self, client: str) -> OpenStream:
        """Adds a stream of a client's address.

        Beyond MAX_STREAMS, the oldest stream of the address with most streams has to end. A browser
        whose stream ends connects again, and misses no event.
        """
        made = OpenStream(client)
        self._open.append(made)
        while len(self._open) > MAX_STREAMS:
            [(most, _)] = Counter(each.client for each in self._open).most_common(1)
            oldest = next(each for each in self._open if each.client == most)
            oldest.over = True
            self._open.remove(oldest)
        return made

    def remove(self, stream: OpenStream) -> None:
        """Removes an ended stream, unless :meth:`add` has."""
        if stream in self._open:
            self._open.remove(stream)
