"""``r2serve relay … -- COMMAND``: runs a command whose connections between nodes are carried.

The command finds the virtual address of node 0 in ``MASTER_ADDR``. Words of the command may
contain ``{master}``, the virtual address of node 0, and ``{address}``, the own virtual address.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from r2serve import children
from r2serve.relay.client import Carried
from r2serve.relay.parent import Failure, RelayProcess
from r2serve.variables import MANAGEMENT, RELAY

FAILED = children.FAILED
"""Exit status after the loss of the relay or of another node."""
TELLS_S = 0.5
"""Time in which a relay tells why it has reset the connections of the command, s."""
IN_COMMAND = Path(__file__).with_name("in_command")

_LOG = logging.getLogger("r2serve.relay")


def run(relay: RelayProcess, argv: Sequence[str], port: int, management: str | None) -> int:
    """Runs the command behind a relay that is ready; returns the exit status.

    Raises:
        ConfigError: the command cannot be started.
    """
    carried = Carried(relay.prefix, relay.node)
    env = environment(carried, port, os.environ, management)
    with children.running(filled(argv, carried), env) as command:

        def lost(error: Failure) -> None:
            _LOG.error("the command is ended: %s: %s", type(error).__name__, error)
            command.end()

        relay.on_end(lost)
        status = command.wait()
        # Connections are reset after a loss, so the command may fail before the loss is told here.
        return FAILED if status != 0 and relay.fails(TELLS_S) else status


def environment(
    carried: Carried, port: int, base: Mapping[str, str], management: str | None
) -> dict[str, str]:
    """Returns the environment of the command."""
    paths = [str(IN_COMMAND), *filter(None, [base.get("PYTHONPATH")])]
    env = dict(base)
    env |= {
        RELAY: str(carried),
        "MASTER_ADDR": carried.address_of(0),
        "MASTER_PORT": str(port),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    if management:
        env[MANAGEMENT] = management
    return env


def filled(argv: Sequence[str], carried: Carried) -> list[str]:
    """Returns the command with its addresses."""
    values = {"{master}": carried.address_of(0), "{address}": carried.address}
    words = []
    for word in argv:
        for name, value in values.items():
            word = word.replace(name, value)
        words.append(word)
    return words
