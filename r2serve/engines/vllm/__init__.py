"""The vLLM plugin: ``vllm serve MODEL --distributed-backend r2ccl``.

vLLM loads :func:`register` (entry point group ``vllm.platform_plugins``) in every process, also
when nobody asked for r2ccl, so nothing here imports torch, the core or vLLM before it is called.
"""

from __future__ import annotations

import logging
from importlib.metadata import EntryPoint, entry_points

_LOG = logging.getLogger(__name__)
_GROUP = "vllm.platform_plugins"
_OUR_VALUE = f"{__name__}:register"


def register() -> str | None:
    """Name the platform class that vLLM shall use in place of the one it would have picked.

    Returns:
        The qualified name of a subclass of vLLM's own platform for this machine, or None where
        r2ccl has nothing to add: an unsupported platform, several at once (vLLM reports that
        itself), or another plugin that brings a platform (vLLM allows only one).
    """
    from vllm.platforms import builtin_platform_plugins

    from r2serve.engines.vllm import classes

    picked = [name for probe in builtin_platform_plugins.values() if (name := probe()) is not None]
    if len(picked) != 1:
        return None
    ours = classes.PLATFORMS.get(picked[0])
    if ours is None:
        _LOG.debug("no r2ccl for platform %s: vLLM is left as it is", picked[0])
        return None
    rival = _active_rival()
    if rival is not None:
        _LOG.warning(
            "platform plugin %s is active and vLLM takes only one: "
            "--distributed-backend r2ccl is not available",
            rival,
        )
        return None
    return ours


def _active_rival() -> str | None:
    """The name of another platform plugin that vLLM would activate, if there is one."""
    from vllm import envs

    for plugin in entry_points(group=_GROUP):
        named = envs.VLLM_PLUGINS is None or plugin.name in envs.VLLM_PLUGINS
        if plugin.value != _OUR_VALUE and named and _activates(plugin):
            return plugin.name
    return None


def _activates(plugin: EntryPoint) -> bool:
    try:
        return plugin.load()() is not None
    except Exception:  # noqa: BLE001  a stranger's code; vLLM, too, counts a failure as a no
        _LOG.debug("platform plugin %s failed", plugin.name, exc_info=True)
        return False
