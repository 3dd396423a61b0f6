"""Processes without a journal that serve: the folder takes no file, or there is no rail.

A worker cannot leave a file in a folder that is full, missing or read-only. So the worker listens
on an abstract unix socket, whose name contains a digest of the folder. A sidecar in the same
network namespace finds the name in /proc/net/unix and reads a line of JSON. A name needs no file
system and ends with the worker.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import socket
import struct
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from r2serve.forks import close_in_children

_LOG = logging.getLogger("r2serve.observe")
_PREFIX = "r2serve-unobserved"
_NAMES = Path("/proc/net/unix")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: SO_PEERCRED of unix(7)
_TALK_S = 0.2
_ASK_AGAIN_S = 10.0
_MAX_BYTES = 8192
_LONGEST_WHY = 500
MAX_NOTES = 256
"""Most workers that a sidecar asks."""


@dataclass(frozen=True)
class Note:
    """A worker without a journal, and the reason.

    has_rails: False for the first process of an engine without rails: nothing is missing there.
    """

    process: int
    label: str
    serving_engine: str
    why: str
    has_rails: bool = True

    def __str__(self) -> str:
        what = "runs without a journal" if self.has_rails else "has nothing to protect"
        return f"{self.label} (process {self.process}) {what}: {self.why}"


class Unobserved:
    """Tells sidecars of a folder about a worker without a journal, until :meth:`close`."""

    def __init__(self, folder: str, note: Note) -> None:
        """Raises OSError if the socket cannot be made."""
        self._line = json.dumps(asdict(replace(note, why=note.why[:_LONGEST_WHY]))).encode()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        close_in_children(self)
        self._socket.bind(f"\0{_prefix(folder)}-{os.getpid()}-{secrets.token_hex(4)}")
        self._socket.listen(8)
        threading.Thread(target=self._serve, name="r2serve-unobserved", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the serving thread
        self._socket.close()

    def left_behind(self) -> None:
        """Closes the socket in a forked child; the parent goes on listening."""
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return  # closed
            with client, contextlib.suppress(OSError):
                client.settimeout(_TALK_S)
                client.sendall(self._line)


class Notes:
    """The workers without a journal in a folder, as far as they run in this network namespace."""

    def __init__(self, folder: str | Path) -> None:
        self._prefix = _prefix(str(folder))
        self._known: dict[str, Note] = {}
        self._ask_again_s: dict[str, float] = {}

    def look(self) -> list[Note]:
        """Returns the running workers without a journal; asks each worker until it answers."""
        names = sorted(self._names())[:MAX_NOTES]
        self._known = {name: self._known[name] for name in names if name in self._known}
        self._ask_again_s = {
            name: at_s for name, at_s in self._ask_again_s.items() if name in names
        }
        now_s = time.monotonic()
        for name in names:
            if name in self._known or self._ask_again_s.get(name, 0.0) > now_s:
                continue
            if (note := _asked(name)) is not None:
                self._known[name] = note
            else:  # perhaps a stopped process, which must not hold up every look
                self._ask_again_s[name] = now_s + _ASK_AGAIN_S
        return list(self._known.values())

    def _names(self) -> set[str]:
        try:
            lines = _NAMES.read_text(errors="replace").splitlines()
        except OSError:
            return set()  # no /proc here
        paths = (line.rpartition(" ")[2] for line in lines)
        return {path[1:] for path in paths if path.startswith(f"@{self._prefix}-")}


def _prefix(folder: str) -> str:
    digest = hashlib.sha256(os.fsencode(os.path.abspath(folder))).hexdigest()[:16]
    return f"{_PREFIX}-{digest}"


def _asked(name: str) -> Note | None:
    """Asks a worker; None: no answer, or the socket belongs to another user."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(_TALK_S)
            asking.connect("\0" + name)
            credentials = asking.getsockopt(
                socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
            )
            _, user, _ = _CREDENTIALS.unpack(credentials)
            if user not in (0, os.getuid()):
                return None
            data = b""
            while (more := asking.recv(_MAX_BYTES)) and len(data) <= _MAX_BYTES:
                data += more
        said = json.loads(data)
        return Note(
            int(said["process"]),
            str(said["label"]),
            str(said["serving_engine"]),
            str(said["why"]),
            bool(said.get("has_rails", True)),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        _LOG.debug("%s: no answer: %s", name, error)
        return None
