"""Values that every node of a job must share, and the sentence about a difference."""

from __future__ import annotations

import os
from collections.abc import Mapping

from r2serve.config import Config
from r2serve.option import PREFIX, show
from r2serve.variables import BACKEND

COMMON_OPTIONS = (
    "slot_bytes",
    "slots",
    "chunk_bytes",
    "spare_slots",
    "algorithm",
    "resilience",
    "checksum",
    "fallback",
    "consensus",
    "consensus_result",
)
"""Options with the same value on every rank. The core compares them again with each handshake."""

SAME = "must be the same on every node"
"""Words of every sentence about a difference."""
_NAMED = 3
"""Further differences that a sentence names, without their values."""


def common_options(config: Config) -> dict[str, str]:
    """Returns the options that all ranks must share, as text."""
    shown = {name: show(getattr(config, name)) for name in COMMON_OPTIONS}
    if config.consensus == "auto":  # outside of an engine
        shown["consensus"] = "off"
    return shown


def node_values(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns what a node shares with the others of its job, the most important value first.

    Keys are the names that a user knows. A node without r2ccl shares its choice alone.

    Raises:
        ConfigError: an option is wrong.
    """
    environ = os.environ if environ is None else environ
    backend = environ.get(BACKEND)
    values = {} if backend is None else {f"--distributed-backend ({BACKEND})": backend}
    if backend not in (None, "r2ccl"):
        return values
    config = Config.from_env(environ)
    shared = common_options(config)
    if backend is not None:  # else a job without an engine
        shared = {"control": config.control, **shared}
        if config.consensus == "auto":
            shared["consensus"] = "step"
    return values | {f"{name} ({PREFIX}{name.upper()})": text for name, text in shared.items()}


def difference(own: Mapping[str, str], here: str, theirs: Mapping[str, str], there: str) -> str:
    """Returns a sentence about the first value that differs; empty: none does.

    A value that one side does not tell is no difference. here, there: node and host of each side.
    """
    first, *more = [name for name, value in own.items() if theirs.get(name, value) != value] or [""]
    if not first:
        return ""
    also = f" (also different: {', '.join(more[:_NAMED])})" if more else ""
    return f"{first} is {own[first]!r} on {here} and {theirs[first]!r} on {there}: {SAME}{also}"


def relays_differ(without: str, other: str) -> str:
    """Returns a sentence about two nodes with equal values, of which only ``other`` has a relay."""
    return (
        f"{without} runs without a relay and {other} with one, although their values are equal: "
        f"{SAME}; the log of {without} says why its connections stay direct"
    )


def node_place(node: int, host: str) -> str:
    """Returns the words for a node in :func:`difference`."""
    return f"node {node} (host {host})"
