"""Comparison of ``--distributed-backend`` and of options between the ranks of an engine.

This is the last comparison, for starts that :mod:`r2serve.engines.vllm.node_values` does not know:
under Ray, by an external launcher, of data-parallel engines, and of several nodes on one host. A
start script of one node may lack the flag, or set another option. Both kinds of ranks load this
plugin, so every rank tells its values over torch's own store, before the first communicator is
made. Without the comparison the ranks would exchange different messages, and wait for each other.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import weakref
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from r2serve.agreement import SAME, difference, node_values
from r2serve.engines import flag
from r2serve.errors import ConfigError

_LOG = logging.getLogger(__name__)

WAIT_S = {"r2ccl": 45.0, "default": 10.0}
"""Longest wait for the choices of other ranks, by the own choice. A node without r2serve never
tells a choice; ranks without the flag then go on as without r2serve."""

_compared: weakref.WeakSet[Any] = weakref.WeakSet()
"""Stores with a finished comparison."""


def compare() -> None:
    """Compares the values with all ranks of torch's default group, once.

    Raises:
        ConfigError: names the flag or an option, and the ranks and hosts with each value.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if not dist.is_initialized() or dist.get_world_size() < 2:
        return
    store = distributed_c10d._get_default_store()
    if store in _compared:
        return
    compare_over(store, dist.get_rank(), dist.get_world_size())
    _compared.add(store)


def compare_over(store: Any, rank: int, ranks: int) -> None:
    """Compares the values of all ranks over a ``torch.distributed.Store``.

    Raises:
        ConfigError: see :func:`compare`.
    """
    own = "r2ccl" if flag.active() else "default"
    values = node_values({flag.VARIABLE: "default"} | dict(os.environ))
    store.set(_values_key(rank), json.dumps(values))  # the choice shows that the values are there
    store.set(_key(rank), json.dumps([own, socket.gethostname()]))
    others = [other for other in range(ranks) if other != rank]
    silent = []
    told = {rank: (own, socket.gethostname())}
    wait = timedelta(seconds=WAIT_S[own])
    for other in others:
        try:
            store.wait([_key(other)], wait)
        except RuntimeError as error:  # torch's errors of a timeout and of a lost store
            _LOG.debug("rank %d has not told its --distributed-backend: %s", other, error)
            silent.append(other)
            wait = timedelta(milliseconds=1)  # the time is over for all
            continue
        value, host = json.loads(store.get(_key(other)))
        told[other] = (value, host)
    if any(value != own for value, _ in told.values()):
        raise ConfigError(f"{_difference(told)}: {SAME}")
    _compare_options(store, rank, values, told)
    if silent and own == "r2ccl":
        raise ConfigError(
            f"--distributed-backend ({flag.VARIABLE}) is 'r2ccl' on rank {rank} (host "
            f"{told[rank][1]}), and unknown on rank {', '.join(map(str, silent))}: r2serve must be "
            "installed, with the same flag, on every node (a rank without it uses 'default')"
        )


def _compare_options(
    store: Any, rank: int, values: Mapping[str, str], told: dict[int, tuple[str, str]]
) -> None:
    """Compares the own values with those of each rank that has told its choice.

    Raises:
        ConfigError: names the first option that differs, with both ranks and hosts.
    """
    for other in told:
        if other == rank or not store.check([_values_key(other)]):
            continue
        theirs = json.loads(store.get(_values_key(other)))
        text = difference(values, _place(rank, told), theirs, _place(other, told))
        if text:
            raise ConfigError(text)


def _key(rank: int) -> str:
    return f"r2serve/distributed_backend/{rank}"


def _values_key(rank: int) -> str:
    return f"r2serve/rank_values/{rank}"


def _place(rank: int, told: dict[int, tuple[str, str]]) -> str:
    return f"rank {rank} (host {told[rank][1]})"


def _difference(told: dict[int, tuple[str, str]]) -> str:
    """Returns each value with its ranks and hosts."""
    parts = []
    for value in sorted({value for value, _ in told.values()}):
        ranks = ", ".join(_place(rank, told) for rank, (its, _) in told.items() if its == value)
        parts.append(f"{value!r} on {ranks}")
    return f"--distributed-backend ({flag.VARIABLE}) is {' and '.join(parts)}"
