"""Request logs: files beside the journals, with a JSON object per line (docs/journal.md).

A worker logs each stalled step with the names of the requests, and the pace of each ended request.
The engine's front end logs the timings of each request. The writer holds a lock on the file, as
for journals. The size is bounded, and lines are dropped while the folder has no room. The first
line identifies the writer.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from r2serve.forks import close_in_children
from r2serve.observe.safe_open import open_regular

VERSION = 1
PATTERN = "*.requests"
LIMIT_BYTES = 4 << 20
"""Size limit of a file; a full file is rotated to ``.1`` and a new file begins."""
CLAIM_BYTES = 64 << 10
"""A log asks for room in the folder in steps of this size."""
ASK_AGAIN_S = 1.0
"""A log without room asks again after this time, because each question reads the folder."""
_CHUNK = 16 * 1024
_LOG = logging.getLogger("r2serve.observe")


class RequestLogError(ValueError):
    """The file is no request log of this version."""


def previous(path: Path) -> Path:
    """Returns the path of the rotated part of a log."""
    return path.with_name(path.name + ".1")


def unfinished(path: Path) -> Path:
    """Returns the path of a part in creation; a leftover belongs to a killed writer."""
    return path.with_name(path.name + ".new")


def replacement(path: Path) -> Path:
    """Returns the path of a part in rotation; a leftover belongs to a killed writer."""
    return path.with_name(path.name + ".old")


class RequestLog:
    """Writer of a request log. Written lines survive any end of the process, SIGKILL included.

    In a forked child the log is closed, and lines are dropped.
    """

    def __init__(
        self,
        path: Path,
        *,
        writer: str,
        label: str,
        about: Mapping[str, str] | None = None,
        serving_engine: str = "",
        limit_bytes: int = LIMIT_BYTES,
        room_for: Callable[[int], str] | None = None,
    ) -> None:
        """Creates the file.

        writer: "worker" or "frontend". label: display name, e.g. "rank 0". about: labels of the
        engine's own metrics. serving_engine: name of the engine. room_for: returns the
        reason why the folder has no room for a number of bytes, or an empty text.

        Raises:
            OSError: the file exists already, or creation failed.
        """
        self.path = path
        self._limit_bytes = limit_bytes
        self._head = {
            "r2serve": "requests",
            "version": VERSION,
            "writer": writer,
            "label": label,
            "about": dict(about or {}),
            "serving_engine": serving_engine,
            "process": os.getpid(),
            "opened_ns": time.monotonic_ns(),
            "opened_clock_ns": time.time_ns(),
        }
        self._room_for = room_for
        self._claimed = CLAIM_BYTES
        self._refused = ""
        self._ask_again_s = 0.0
        if room_for is not None and (why := room_for(CLAIM_BYTES)):
            raise OSError(errno.ENOSPC, why)
        self._file = self._made()
        close_in_children(self)
        os.link(unfinished(path), path)  # fails if the path exists
        os.unlink(unfinished(path))

    def write(self, line: dict[str, Any]) -> None:
        """Appends a line; a line longer than the size limit, or without room, is dropped.

        Raises:
            OSError: the file system is full or unavailable.
        """
        if self._file < 0:
            return  # closed, or a forked child
        data = _encoded(line)
        if self._bytes + len(data) > self._limit_bytes:
            self._turn()
        if self._bytes + len(data) <= self._limit_bytes and self._has_room(len(data)):
            self._append(self._file, data)
            self._bytes += len(data)

    def close(self) -> None:
        self.left_behind()

    def left_behind(self) -> None:
        """Closes the file, in this process only."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _has_room(self, more: int) -> bool:
        """Claims room in the folder for the line; gives up older lines if there is none."""
        if self._room_for is None or self._bytes + more <= self._claimed:
            return True
        if time.monotonic() < self._ask_again_s:
            return False
        claim = max(more, CLAIM_BYTES)
        why = self._room_for(claim)
        for give_up in (self._drop_previous, self._drop_all):
            if why:
                give_up()
                why = self._room_for(claim)
        if not why:
            self._claimed = self._bytes + claim
            return True
        self._ask_again_s = time.monotonic() + ASK_AGAIN_S
        if not self._refused:
            self._refused = why
            _LOG.warning("%s: lines are dropped: %s", self.path, why)
        return False

    def _drop_previous(self) -> None:
        previous(self.path).unlink(missing_ok=True)

    def _drop_all(self) -> None:
        self._turn()
        self._drop_previous()

    def _turn(self) -> None:
        """Rotates the log; a log exists at `path` at every moment."""
        new = self._made()
        second = replacement(self.path)
        os.link(self.path, second)
        os.replace(second, previous(self.path))
        os.replace(unfinished(self.path), self.path)
        os.close(self._file)
        self._file = new
        self._claimed = 0  # the next line asks

    def _made(self) -> int:
        place = unfinished(self.path)
        place.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        file = os.open(place, flags, 0o600)
        head = _encoded(self._head)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._append(file, head)
        except OSError:
            os.close(file)
            place.unlink(missing_ok=True)
            raise
        self._bytes = len(head)
        return file

    def _append(self, file: int, data: bytes) -> None:
        """Writes all bytes or none; a partial line would corrupt the next line."""
        written = os.write(file, data)
        if written < len(data):
            os.ftruncate(file, os.fstat(file).st_size - written)
            raise OSError(errno.ENOSPC, f"{self.path}: no room for a line")


def _encoded(line: dict[str, Any]) -> bytes:
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


class Follower:
    """Reader of a growing log: returns each line once, across rotations."""

    def __init__(self, path: Path, owners: Collection[int] | None = None) -> None:
        """Opens the oldest part of the log.

        owners: users to whom the parts may belong; None: any user.

        Raises:
            OSError: the file cannot be opened, or belongs to another user.
        """
        self.path = path
        self._owners = owners
        self.head: dict[str, Any] = {}
        self.broken = 0
        """Number of malformed or overlong lines."""
        self.at_end = False
        """The last read found no more data."""
        try:
            self._file = open_regular(previous(path), owners)
        except FileNotFoundError:
            self._file = open_regular(path, owners)
        self._rest = b""
        self._skipping = False

    def lines(self) -> tuple[list[dict[str, Any]], int]:
        """Returns the next new lines, at most a 16 KiB chunk, and the number of bytes read.

        Raises:
            OSError: the file cannot be read.
            RequestLogError: the file is no request log of this version.
        """
        data = os.read(self._file, _CHUNK)
        if not data and (new := self._successor()) is not None:
            # The writer has rotated this part, so this read returns the rest.
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
            del whole[0]  # tail of the overlong line
            self._skipping = False
        if len(self._rest) > LIMIT_BYTES:
            self._rest, self._skipping = b"", True
            self.broken += 1
        return [parsed for line in whole if (parsed := self._parsed(line)) is not None], len(data)

    def clock_ns(self, time_ns: int) -> int:
        """Converts a CLOCK_MONOTONIC time of this log to CLOCK_REALTIME, both in ns."""
        return int(self.head["opened_clock_ns"]) + time_ns - int(self.head["opened_ns"])

    def close(self) -> None:
        os.close(self._file)

    def _successor(self) -> int | None:
        """Opens the next part of the log; None if the current part is the newest."""
        try:
            new = open_regular(self.path, self._owners)
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
                raise RequestLogError(f"version {found.get('version')}: must be {VERSION}")
            if not all(isinstance(found.get(name), int) for name in _CLOCKS):
                raise RequestLogError("the first line has no clocks (opened_ns, opened_clock_ns)")
            self.head = found
            return None
        if not self.head:
            raise RequestLogError("the first line is no header of a request log")
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
