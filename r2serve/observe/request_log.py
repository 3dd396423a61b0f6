"""Request logs: what engines note of requests, a JSON object a line, in files beside the journals.

A worker names the requests of every step that rail events held up, and the pace of each request
that ended; an engine's front end adds the times that its client saw (docs/journal.md).  A file is
locked by its writer, as journals are, and of bounded size; its first line says whose it is.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from r2serve.observe.safe_open import open_regular

VERSION = 1
PATTERN = "*.requests"
LIMIT_BYTES = 4 << 20
"""A file that has grown so far becomes its own predecessor (``.1``), and a new one is begun."""
LONGEST_NAME = 512
"""Of a request: clients choose them."""
_CHUNK = 16 * 1024


class RequestLogError(ValueError):
    """The file is no request log of this version."""


def previous(path: Path) -> Path:
    """Where the older part of a log is, once there is one."""
    return path.with_name(path.name + ".1")


def unfinished(path: Path) -> Path:
    """Where a part is made; what is there belongs to a writer that was killed meanwhile."""
    return path.with_name(path.name + ".new")


class RequestLog:
    """The writer's end.  A line that was written outlives its writer, however that ends."""

    def __init__(
        self,
        path: Path,
        *,
        writer: str,
        label: str,
        about: Mapping[str, str] | None = None,
        limit_bytes: int = LIMIT_BYTES,
    ) -> None:
        """writer: "worker" or "frontend"; label: for people; about: what the writer serves.

        Raises:
            OSError: the file is there already, or cannot be made.
        """
        self.path = path
        self._limit_bytes = limit_bytes
        self._head = {
            "r2serve": "requests",
            "version": VERSION,
            "writer": writer,
            "label": label,
            "about": dict(about or {}),
            "process": os.getpid(),
            "opened_ns": time.monotonic_ns(),
            "opened_clock_ns": time.time_ns(),
        }
        self._file = self._made()
        os.link(unfinished(path), path)  # never over one that is there
        os.unlink(unfinished(path))

    def write(self, line: dict[str, Any]) -> None:
        """Add a line; one that is longer than a whole log is left out.

        Raises:
            OSError: the file system is full, or gone.
        """
        data = _encoded(line)
        if self._bytes + len(data) > self._limit_bytes:
            self._turn()
        if self._bytes + len(data) <= self._limit_bytes:
            self._append(self._file, data)
            self._bytes += len(data)

    def close(self) -> None:
        os.close(self._file)

    def _turn(self) -> None:
        """Begin anew; at every moment there is a log of this name."""
        new = self._made()
        second = self.path.with_name(self.path.name + ".old")
        os.link(self.path, second)
        os.replace(second, previous(self.path))
        os.replace(unfinished(self.path), self.path)
        os.close(self._file)
        self._file = new

    def _made(self) -> int:
        place = unfinished(self.path)
        place.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        file = os.open(place, flags, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        head = _encoded(self._head)
        self._append(file, head)
        self._bytes = len(head)
        return file

    def _append(self, file: int, data: bytes) -> None:
        """All of it or nothing: half a line would spoil the next one."""
        written = os.write(file, data)
        if written < len(data):
            os.ftruncate(file, os.fstat(file).st_size - written)
            raise OSError(errno.ENOSPC, f"{self.path}: no room for a line")


def _encoded(line: dict[str, Any]) -> bytes:
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


class Follower:
    """The reader's end: the lines of a log, each once, while it grows and is begun anew."""

    def __init__(self, path: Path) -> None:
        """Raises OSError where it cannot be read."""
        self.path = path
        self.head: dict[str, Any] = {}
        self.broken = 0
        """Lines that are none, or too long."""
        self.at_end = False
        """There was nothing more to read, the last time."""
        try:
            self._file = open_regular(previous(path))
        except FileNotFoundError:
            self._file = open_regular(path)
        self._rest = b""
        self._skipping = False

    def lines(self) -> tuple[list[dict[str, Any]], int]:
        """What is new, a portion at a time, and how many bytes were read.

        Raises:
            OSError: it cannot be read.
            RequestLogError: it is no request log of this version.
        """
        data = os.read(self._file, _CHUNK)
        if not data and (new := self._successor()) is not None:
            # Its writer has left this part, so that there will not be more of it than this.
            data = os.read(self._file, _CHUNK)
            if data:
                os.close(new)
            else:
                os.close(self._file)
                self._file, self._rest, self._skipping = new, b"", False
                data = os.read(self._file, _CHUNK)
        self.at_end = not data
        *whole, self._rest = (self._rest + data).split(b"\n")
        if self._skipping and whole:
            del whole[0]  # the end of what was too long
            self._skipping = False
        if len(self._rest) > LIMIT_BYTES:
            self._rest, self._skipping = b"", True
            self.broken += 1
        return [parsed for line in whole if (parsed := self._parsed(line)) is not None], len(data)

    def clock_ns(self, time_ns: int) -> int:
        """CLOCK_REALTIME, in ns, at a time of this log's (CLOCK_MONOTONIC)."""
        return int(self.head["opened_clock_ns"]) + time_ns - int(self.head["opened_ns"])

    def close(self) -> None:
        os.close(self._file)

    def _successor(self) -> int | None:
        """The part that was begun after this one, opened."""
        try:
            new = open_regular(self.path)
        except FileNotFoundError:
            return None
        if os.path.samestat(os.fstat(new), os.fstat(self._file)):
            os.close(new)
            return None
        return new

    def _parsed(self, line: bytes) -> dict[str, Any] | None:
        found = _object(line)
        if found is not None and found.get("r2serve") == "requests":
            if found.get("version") != VERSION:
                raise RequestLogError(f"version {found.get('version')}, not {VERSION}")
            if not all(isinstance(found.get(name), int) for name in _CLOCKS):
                raise RequestLogError("its first line has no clocks")
            self.head = found
            return None
        if not self.head:
            raise RequestLogError("it does not begin as a request log does")
        if found is None:
            self.broken += 1
        return found


_CLOCKS = ("opened_ns", "opened_clock_ns")


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
