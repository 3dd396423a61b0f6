"""Registers the hooks of :mod:`r2serve.engines.sglang.table`, and checks that SGLang applied them.

SGLang logs the errors of plugins and hooks, and goes on without the hook. With r2ccl chosen, such a
server would serve without resilience, so the process ends with the reason instead.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from r2serve.config import Config
from r2serve.engines import flag
from r2serve.engines.sglang.table import HOOKS, PYNCCL, RESOLUTION_STEP, Hook
from r2serve.errors import ConfigError, how_to_install

_problem: str | None = None
"""The reason why r2ccl is not available; None: all hooks were applied so far."""


def install() -> None:
    """Registers all hooks; their application is checked when SGLang has applied hooks.

    Raises:
        SystemExit: r2ccl was chosen, and a hook cannot be registered.
    """
    try:
        _register((*HOOKS, PYNCCL) if flag.active() else HOOKS)
    except Exception as error:  # noqa: BLE001  SGLang would log the error and go on
        _report(f"{type(error).__name__}: {error}")


def _register(hooks: Iterable[Hook]) -> None:
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from r2serve.engines.sglang import configuration

    originals = {hook.target: _resolved(hook.target) for hook in hooks}
    for hook in hooks:
        HookRegistry.register(hook.target, hook.load(), HookType[hook.kind])
    register_resolution_hook(RESOLUTION_STEP)(configuration.resolve)
    apply: Callable[[], None] = HookRegistry.apply_hooks

    def apply_and_check() -> None:
        HookRegistry.apply_hooks = apply
        apply()
        check_applied(originals)

    HookRegistry.apply_hooks = apply_and_check


def check_applied(originals: dict[str, object]) -> None:
    """Reports targets that are still the original objects.

    Raises:
        SystemExit: r2ccl was chosen, and SGLang has not applied a hook.
    """
    unchanged = [target for target, original in originals.items() if _resolved(target) is original]
    if unchanged:
        _report(f"SGLang has not applied the hooks of {', '.join(unchanged)}")


def _report(reason: str) -> None:
    global _problem
    _problem = (
        f"{reason}; SGLang would serve without resilience: install the supported release "
        f"({how_to_install('sglang')}), or use --distributed-backend default"
    )
    if flag.active():
        raise SystemExit(
            f"r2serve: {flag.VARIABLE} is r2ccl, but r2ccl is not available: {_problem}"
        )


def _resolved(target: str) -> object:
    """Returns the object at a dotted name, without binding methods.

    Raises:
        AttributeError, ImportError: there is no such object.
    """
    path, _, name = target.rpartition(".")
    found: object = inspect.getattr_static(_owner(path), name)
    return found


def _owner(path: str) -> object:
    """Returns a module, or a class in a module; a module that fails to import keeps its error.

    Raises:
        AttributeError, ImportError: there is no such object, or a module cannot be imported.
    """
    module, _, inside = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path or not module:  # the module exists, and lacks another module
            raise
    owner: object = getattr(_owner(module), inside)
    return owner


def check_available() -> None:
    """Refuses r2ccl when hooks are missing or an option of r2ccl is wrong.

    Raises:
        ConfigError: names the hook, or the option with its value and what would be right.
    """
    if _problem is not None:
        raise ConfigError(_problem)
    Config.from_env()


def add_flag(result: Any, parser: argparse.ArgumentParser) -> None:
    """Hook after ``ServerArgs.add_cli_args``: adds the flag and ``--r2serve-sidecar``."""
    flag.add_to(parser, check_available)
