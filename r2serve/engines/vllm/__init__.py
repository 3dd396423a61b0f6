"""The vLLM plugin: ``vllm serve MODEL --distributed-backend r2ccl``.

vLLM calls :func:`register` (entry point group ``vllm.platform_plugins``) in every process, even
without the flag. So this module imports torch, the core or vLLM only inside functions.
"""

from __future__ import annotations

import logging
import os
from importlib.metadata import EntryPoint, entry_points

from r2serve.variables import RELAY

_LOG = logging.getLogger(__name__)
_GROUP = "vllm.platform_plugins"
_OUR_VALUE = f"{__name__}:register"


def register() -> str | None:
    """Returns the name of a platform class for vLLM, to replace vLLM's own choice.

    Returns:
        The qualified name of a subclass of vLLM's own platform for this machine. None if r2ccl
        does not apply: an unsupported platform, several platforms (vLLM reports the error), or
        another platform plugin (vLLM allows a single plugin).
    """
    from vllm.platforms import builtin_platform_plugins

    from r2serve.engines.vllm import classes, exit_status

    exit_status.hear_deaths()
    if os.environ.get(RELAY):
        # vLLM makes groups of a data-parallel engine before it calls general plugins.
        from r2serve.relay import client, torch_seams

        if (carried := client.Carried.here()) is not None:
            torch_seams.apply(carried)
    picked = [name for probe in builtin_platform_plugins.values() if (name := probe()) is not None]
    if len(picked) != 1:
        return None
    ours = classes.PLATFORMS.get(picked[0])
    if ours is None:
        _LOG.debug("platform %s is not supported by r2ccl: vLLM is unchanged", picked[0])
        return None
    rival = _active_rival()
    if rival is not None:
        _LOG.warning(
            "platform plugin %s is active, and vLLM allows a single platform plugin: "
            "--distributed-backend r2ccl is not available",
            rival,
        )
        return None
    return ours


def join_relay() -> None:
    """Moves listeners to virtual addresses if the node has a relay; see ``control.join``."""
    if os.environ.get(RELAY):
        from r2serve.engines.vllm import control

        control.join()


def _active_rival() -> str | None:
    """Returns the name of another platform plugin activated by vLLM, if any."""
    from vllm import envs

    for plugin in entry_points(group=_GROUP):
        named = envs.VLLM_PLUGINS is None or plugin.name in envs.VLLM_PLUGINS
        if plugin.value != _OUR_VALUE and named and _activates(plugin):
            return plugin.name
    return None


def _activates(plugin: EntryPoint) -> bool:
    try:
        return plugin.load()() is not None
    except Exception:  # noqa: BLE001  foreign code; vLLM counts a failure as inactive, too
        _LOG.debug("platform plugin %s failed", plugin.name, exc_info=True)
        return False
