"""Check of the named rails in the first process of an engine, before any worker starts."""

from __future__ import annotations

import functools
import logging

from r2serve.config import Config
from r2serve.ports.choice import select_ports
from r2serve.ports.rdma import list_ports

_LOG = logging.getLogger(__name__)


def check() -> None:
    """Compares ``R2CCL_RAILS`` and ``R2CCL_MANAGEMENT`` with the interfaces of this node.

    A device that is absent or has no address may come later, so such a device is a warning while
    the engine can start. Nothing is checked without a name, because ``auto`` cannot be misspelt.
    Workers check their rails again.

    Raises:
        ConfigError: names the field, the value, and all interfaces of this node.
    """
    config = Config.from_env()
    if config.rails.strip() != "auto" or config.management:
        _check_names(config.rails, config.management, config.fallback)


@functools.cache
def _check_names(rails: str, management: str, may_wait: bool) -> None:
    """Checks the names once a process, because engines make their configuration repeatedly."""
    try:
        choice = select_ports(rails, management, None, list_ports(), may_wait)
    except OSError as error:
        _LOG.debug("the rails are first checked by the workers: %s", error)
        return
    for text in choice.warnings:
        _LOG.warning("%s", text)
