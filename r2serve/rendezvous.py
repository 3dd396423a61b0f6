"""Exchange of information among the ranks of a communicator before any link exists.

The first information of a rank begins with its release, so that different releases are named before
anything else of another release is read. Readers ignore fields that they do not know.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from r2serve import _core
from r2serve.errors import ConfigError
from r2serve.group_values import all_gather_values

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Exchange = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""Returns the values of all ranks in rank order; a collective call."""

_NAMED = 3
"""Further options that an error names, without their values."""


def with_release(info: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a rank's first information, with the rank's release and a new token before it."""
    release = {"r2serve": version("r2serve"), "wire": _core.wire_version}
    return {**release, "start": secrets.token_hex(8), **info}


def start_of(infos: Sequence[Mapping[str, Any]]) -> str:
    """Returns a text equal on all ranks and different in each start, failed ones included."""
    return "/".join(str(info["start"]) for info in infos)


def introduce(
    exchange: Exchange,
    own: Mapping[str, Any],
    rank: int,
    failure: Exception | None,
    explain: Callable[[Exception, Sequence[Mapping[str, Any]]], str],
) -> list[dict[str, Any]]:
    """Exchanges the first information of all ranks, also of a rank that cannot start.

    Args:
        own: this rank's information; only ``host`` counts after a failure.
        failure: the reason why this rank cannot start; None: it can.
        explain: adds to the text of a failure, from the information of all ranks.

    Raises:
        ConfigError: another rank cannot start, or runs another release, or has other options.
        Exception: ``failure``, with the explanation.
    """
    told = dict(own) if failure is None else {**own, "failed": _words(failure)}
    infos = exchange(with_release(told))
    if failure is not None:
        more = explain(failure, infos)
        raise type(failure)(f"{failure}{more}") if more else failure
    check_releases(infos, rank)
    for other, info in enumerate(infos):
        if info.get("failed"):
            raise ConfigError(f"rank {other} (host {info['host']}) cannot start: {info['failed']}")
    check_options(infos, rank)
    return infos


def agree(exchange: Exchange, rank: int, failure: Exception | None) -> None:
    """Ends a step of the start on all ranks, or raises on all ranks.

    Raises:
        ConfigError: another rank failed.
        Exception: ``failure``.
    """
    outcomes = exchange({"failed": None if failure is None else _words(failure)})
    if failure is not None:
        raise failure
    for other, outcome in enumerate(outcomes):
        if other != rank and outcome["failed"] is not None:
            raise ConfigError(f"rank {other} cannot start: {outcome['failed']}")


def _words(failure: Exception) -> str:
    """Returns the text of an error; never empty."""
    return str(failure) or repr(failure)


def check_options(infos: Sequence[Mapping[str, Any]], rank: int) -> None:
    """Compares the options that all ranks must share; ``rank`` is this rank.

    Raises:
        ConfigError: names the first option that differs, with both ranks, hosts and values.
    """
    own: Mapping[str, str] = infos[rank].get("options", {})
    for other, info in enumerate(infos):
        theirs: Mapping[str, str] = info.get("options", {})
        differing = [name for name, value in own.items() if theirs.get(name, value) != value]
        if differing:
            first, *more = differing
            also = f" (also different: {', '.join(more[:_NAMED])})" if more else ""
            raise ConfigError(
                f"{first} (R2CCL_{first.upper()}) is {own[first]!r} on {_place(infos, rank)} and "
                f"{theirs[first]!r} on {_place(infos, other)}: must be the same on every rank{also}"
            )


def _place(infos: Sequence[Mapping[str, Any]], rank: int) -> str:
    return f"rank {rank} (host {infos[rank].get('host', 'unknown')})"


def check_releases(infos: Sequence[Mapping[str, Any]], rank: int) -> None:
    """Compares the releases of all ranks, in rank order; ``rank`` is this rank.

    Raises:
        ConfigError: a rank has another release than this rank.
    """
    own = _release(infos[rank])
    for other, info in enumerate(infos):
        if _release(info) != own:
            raise ConfigError(
                f"rank {other} (host {info.get('host', 'unknown')}) runs {_release(info)}; this is "
                f"rank {rank} (host {infos[rank].get('host', 'unknown')}) with {own}: all ranks "
                "must run the same release"
            )


def is_of_this_release(info: Mapping[str, Any]) -> bool:
    """Whether a rank's information is of this process's release, so that it can be read."""
    return _release(info) == _release(with_release({}))


def _release(info: Mapping[str, Any]) -> str:
    if "r2serve" not in info:
        return "an r2serve that does not name its version"
    return f"r2serve {info['r2serve']} (wire version {info.get('wire', 'unknown')})"


def over_group(group: ProcessGroup) -> Exchange:
    """Makes an exchange over a torch group with collectives of CPU tensors."""

    def exchange(own: dict[str, Any]) -> list[dict[str, Any]]:
        return all_gather_values(own, group)

    return exchange


def host_of(store: Any) -> str | None:
    """Returns the host of a store, or None for stores without a host."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None)
