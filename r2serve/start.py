"""Start of a communicator: ranks exchange their ports, pair the ports, and connect the links.

Each step that fails on a rank fails on all ranks at once, with the reason.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from r2serve import rendezvous
from r2serve.agreement import common_options
from r2serve.config import Config
from r2serve.errors import ConfigError, StartupTimeoutError
from r2serve.ports.identity import number_nodes
from r2serve.ports.info import ProcessInfo
from r2serve.ports.management_address import owner_of
from r2serve.ports.wires import Wire, questions
from r2serve.process import Process, acquire, release
from r2serve.relay import word

if TYPE_CHECKING:
    from r2serve.rendezvous import Exchange

_LOG = logging.getLogger("r2serve.r2ccl")


def resolved(config: Config | None) -> Config | None:
    """Returns the options of a start, read from the environment if ``config`` is None.

    Returns None if an option is wrong: :func:`join` reads the options again, and tells all ranks.
    """
    if config is not None:
        return config
    try:
        return Config.from_env()
    except Exception:  # noqa: BLE001  told to all ranks by join()
        return None


@dataclass(frozen=True)
class Joined:
    """The result of a start."""

    process: Process
    numbers: list[int]
    """Number of each rank's engine."""
    nodes: list[int]
    """Node of each rank, in order of first appearance."""
    start: str
    """Text equal on all ranks and different in each start."""


def join(
    exchange: Exchange,
    rank: int,
    config: Config | None,
    control: Callable[[], str | None],
    share_engine: bool = True,
) -> Joined:
    """Connects this rank with all other ranks; collective.

    Args:
        config: None: from the environment.
        control: returns the address of this node for control traffic; may raise ConfigError.
        share_engine: see ``Communicator.standalone``.

    Returns:
        The engine, to be released by the caller, and facts about all ranks.

    Raises:
        ConfigError: an option or address is wrong, here or on another rank, or ranks on different
            nodes have no rails.
        StartupTimeoutError: on some rank no rail to a peer came up within ``connect_timeout_s`` or
            ``call_timeout_s``.
    """
    failure: Exception | None = None
    process: Process | None = None
    own: dict[str, Any] = {"host": socket.gethostname()}
    try:
        config = config or Config.from_env()
        process = acquire(config, rank, control(), share_engine)
        own = {
            **process.info.to_wire(),
            "options": common_options(config),
            "word": word.endpoint(),
        }
    except Exception as error:  # noqa: BLE001  told to all ranks, and raised by introduce()
        failure = error
        _LOG.error("rank %d cannot start: %s", rank, error)
    try:
        wires = rendezvous.introduce(exchange, own, rank, failure, _explained)
        assert process is not None
        infos = _processes(wires)
        nodes = number_nodes([info.node for info in infos])
        rendezvous.agree(exchange, rank, _add_peers(exchange, process, infos, rank, nodes))
        numbers = [info.process for info in infos]
        _connect(exchange, process, rank, [each for each in numbers if each != numbers[rank]])
        places = [str(wire.get("word", "")) for wire in wires]
        word.hold(
            (place, number)
            for place, number, node in zip(places, numbers, nodes, strict=True)
            if place and node != nodes[rank]
        )
    except BaseException:
        if process is not None:
            release(process)
        raise
    return Joined(process, numbers, nodes, rendezvous.start_of(wires))


def _explained(failure: Exception, infos: Sequence[Mapping[str, Any]]) -> str:
    """Names the rank with the address of a failure, if another rank has it."""
    return owner_of(failure, [_readable(info) for info in infos])


def _processes(infos: Sequence[Mapping[str, Any]]) -> list[ProcessInfo]:
    """Reads the information of all ranks, in rank order, as introduce() returned it.

    Raises:
        ConfigError: the information of a rank is malformed; the same error on every rank.
    """
    found = []
    for rank, info in enumerate(infos):
        try:
            found.append(ProcessInfo.from_wire(dict(info)))
        except (KeyError, TypeError, ValueError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(
                f"the information of rank {rank} (host {info.get('host', 'unknown')}) is "
                f"malformed: {reason}; all ranks must run the same build of r2serve"
            ) from error
    return found


def _readable(info: Mapping[str, Any]) -> ProcessInfo | None:
    if "failed" in info or not rendezvous.is_of_this_release(info):
        return None
    try:
        return ProcessInfo.from_wire(dict(info))
    except (KeyError, TypeError, ValueError) as error:
        _LOG.debug("the information of a rank is malformed: %r", error)  # the failure comes first
        return None


def _add_peers(
    exchange: Exchange,
    process: Process,
    infos: Sequence[ProcessInfo],
    rank: int,
    nodes: Sequence[int],
) -> Exception | None:
    """Makes the links to all other ranks; returns the error, for all ranks."""
    asked = questions(infos)
    wires: frozenset[Wire] = frozenset()
    if asked:  # on every rank or on none
        own: list[Wire] = []
        failure: Exception | None = None
        try:
            own = process.find_wires([each for each in asked if each.asking == rank])
        except Exception as error:  # noqa: BLE001  no socket for a probe, for example
            failure = error
        answers = exchange({"wires": own})
        if failure is not None:
            return failure
        wires = frozenset((one, other) for answer in answers for one, other in answer["wires"])
    try:
        for other, info in enumerate(infos):
            if other != rank:
                process.add_peer(info, f"rank {other}", nodes[rank], wires)
        process.tell_unpaired(infos, wires)
    except Exception as error:  # noqa: BLE001  told to all ranks, and raised by agree()
        return error
    return None


def _connect(exchange: Exchange, process: Process, rank: int, peers: list[int]) -> None:
    """Connects the links to all peers; returns when all ranks have connected.

    The final exchange keeps a fast rank from closing its links before a slow rank sees rails up.
    """
    config = process.config
    limited = 0 < config.call_timeout_s < config.connect_timeout_s
    limit = "call_timeout_s" if limited else "connect_timeout_s"
    failure: Exception | None = None
    try:
        process.engine.connect(peers, getattr(config, limit), f"{limit} (R2CCL_{limit.upper()})")
    except Exception as error:  # noqa: BLE001  told to all ranks
        failure = error
    outcomes = exchange({"failed": None if failure is None else str(failure)})
    if isinstance(failure, StartupTimeoutError):
        raise StartupTimeoutError(f"rank {rank} did not connect: {failure}") from failure
    if failure is not None:
        raise failure
    for other, outcome in enumerate(outcomes):
        if outcome["failed"] is not None:
            raise StartupTimeoutError(f"rank {other} did not connect: {outcome['failed']}")
