"""Checks of options that depend on each other, and of texts."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import stat
from typing import Any

from r2serve import cpus
from r2serve.errors import ConfigError
from r2serve.option import complaint, show, worded
from r2serve.private_files import why_not_private

MAX_CHUNKS_PER_SLOT = 64  # the receiver marks a slot's chunks in one 64-bit word
# A unix socket path has at most 107 bytes; "/r2ccl-4194304-ffffffff.drills" takes 30 bytes.
LONGEST_DRILL_FOLDER = 77
LONGEST_ENGINE_NAME = 15  # bytes of the journal's header
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def check_across_fields(config: Any) -> None:
    """Checks the options that depend on others, and the texts; ``config`` is a Config.

    Raises:
        ConfigError: names the option, its value and what would be right.
    """
    if config.slot_bytes % config.chunk_bytes:
        raise _wrong("slot_bytes", config, f"a multiple of chunk_bytes ({config.chunk_bytes})")
    if config.slot_bytes // config.chunk_bytes > MAX_CHUNKS_PER_SLOT:
        limit = MAX_CHUNKS_PER_SLOT * config.chunk_bytes
        raise _wrong("slot_bytes", config, f"at most {limit} for chunk_bytes {config.chunk_bytes}")
    for small, large in (
        ("small_message_bytes", "chunk_bytes"),
        ("ack_deadline_floor_ms", "dead_deadline_ms"),
        ("rejoin_backoff_min_ms", "rejoin_backoff_max_ms"),
    ):
        if getattr(config, small) > getattr(config, large):
            raise _wrong(small, config, f"at most {large} ({show(getattr(config, large))})")
    _check_texts(config)
    if wanted := cpus.parsed(config.background_cpus):
        permitted = cpus.permitted()
        if not wanted <= permitted:
            right = f"empty, or CPUs that this process may use ({cpus.shown(permitted)})"
            raise _wrong("background_cpus", config, right)


def _check_texts(config: Any) -> None:
    if config.rails != "auto":
        names = config.rails.split(",")
        if any(not name or name != name.strip() or " " in name for name in names):
            raise _wrong("rails", config, "auto, or devices or addresses between commas")
        if len(set(names)) != len(names):
            raise _wrong("rails", config, "a list without duplicates")
    library = config.cuda_library
    named = bool(library) and all(c.isprintable() and not c.isspace() for c in library)
    if not (os.path.isfile(library) if os.sep in library else named):
        raise _wrong("cuda_library", config, "an existing file or a name that the loader finds")
    for name in ("node", "management"):
        text = getattr(config, name)
        if any(not letter.isprintable() or letter.isspace() for letter in text):
            raise _wrong(name, config, "a single word without spaces")
    folder = config.journal_dir
    if not _is_path(folder):
        raise _wrong("journal_dir", config, "empty or the path of a folder")
    name = config.serving_engine
    if len(name.encode(errors="replace")) > LONGEST_ENGINE_NAME or not all(
        letter.isprintable() and not letter.isspace() for letter in name
    ):
        right = f"a word of at most {LONGEST_ENGINE_NAME} bytes, or empty"
        raise _wrong("serving_engine", config, right)
    if config.drills and not folder:
        raise _wrong("drills", config, "off, or journal_dir must be set")
    if config.drills and len(os.fsencode(folder)) > LONGEST_DRILL_FOLDER:
        right = f"a path of at most {LONGEST_DRILL_FOLDER} bytes while drills is on"
        raise _wrong("journal_dir", config, right)
    for address in filter(None, config.control_master.split(",")):
        try:
            ipaddress.ip_address(address)
        except ValueError:
            right = "empty, or IP addresses of node 0 between commas"
            raise _wrong("control_master", config, right) from None
    if config.secret_file and not os.path.isfile(config.secret_file):
        raise _wrong("secret_file", config, "empty, or an existing file")
    if config.fault_file:
        _check_fault_file(config)


def _check_fault_file(config: Any) -> None:
    """Refuses a file that others can write, its group included: each line takes a rail down."""
    path = config.fault_file
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise _wrong("fault_file", config, "empty, or a file in an existing folder")
    file: os.stat_result | None = None
    try:
        with contextlib.suppress(FileNotFoundError):  # the file is made later
            file = os.stat(path)
    except OSError as error:
        raise _wrong("fault_file", config, f"a usable path: {error.strerror}") from error
    if file is not None and (why := why_not_private(file, _OTHERS_WRITE)):
        raise _wrong("fault_file", config, f"closed to other users, but the file {why}")
    around = os.stat(folder)
    protects = file is not None and around.st_mode & stat.S_ISVTX  # as /tmp does
    if not protects and (why := why_not_private(around, _OTHERS_WRITE)):
        raise _wrong("fault_file", config, f"closed to other users, but its folder {why}")


def _is_path(text: str) -> bool:
    """Whether the operating system takes the text as a path: has an encoding, and no NUL byte."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _wrong(name: str, config: Any, right: str) -> ConfigError:
    value = getattr(config, name)
    if isinstance(value, bool):
        return ConfigError(worded(name, show(value), right))
    return ConfigError(complaint(name, value, right))
