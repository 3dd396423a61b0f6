"""Call sites: the places of the user's program that call collectives, compared between ranks.

Ranks whose programs have parted can make calls of equal shapes from different places. With
``R2CCL_CONSENSUS=site`` every call that all ranks make together carries a hash of its place.
"""

from __future__ import annotations

import os
import sys
import zlib
from types import CodeType, FrameType
from typing import TypeVar

from r2serve import _core

_BETWEEN = ("r2serve", "torch", "vllm.distributed", "threading")
"""Packages between the user's program and the core."""

Key = TypeVar("Key")

MOST = 4096
"""Sites kept in each table, fewer than half of those in the core. A program may give each of its
calls another name."""

_known: dict[tuple[CodeType, int], int] = {}
_named: dict[str, int] = {}


def mark(name: str | None) -> None:
    """Sets the site of this thread's next collective: ``name``, or the line of the program."""
    _core.set_next_site(_site_of_name(name) if name is not None else _site_of_caller())


def place(module: str, file: str, line: int) -> str:
    """Returns the text of a place: path of the module relative to its package root, and line.

    The path is the same on machines with different installation folders.
    """
    path = os.path.basename(file) if module == "__main__" else module.replace(".", "/") + ".py"
    return f"{path}:{line}"


def _site_of_name(name: str) -> int:
    site = _named.get(name)
    if site is None:
        site = _noted(f"name {name!r}")
        _keep(_named, name, site)
    return site


def _site_of_caller() -> int:
    """Returns 0 on a thread of this library, whose caller is unknown."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        key = frame.f_code, frame.f_lineno
        site = _known.get(key)
        if site is None:
            module = frame.f_globals.get("__name__", "")
            file = frame.f_code.co_filename
            between = any(module == each or module.startswith(each + ".") for each in _BETWEEN)
            # Compiled code: a module of inductor's cache has another name on every rank.
            generated = "torchinductor" in file or file.startswith("<")
            skipped = between or generated
            site = 0 if skipped else _noted(place(module, file, frame.f_lineno))
            _keep(_known, key, site)
        if site:
            return site
        frame = frame.f_back
    return 0


def _keep(table: dict[Key, int], key: Key, site: int) -> None:
    """Forgets all sites if the table is full; the core then gets their texts again."""
    if len(table) >= MOST:
        _known.clear()
        _named.clear()
    table[key] = site


def _noted(text: str) -> int:
    site = zlib.crc32(text.encode()) or 1
    _core.note_site(site, text)
    return site
