"""The plugin for SGLang: registered hooks, and the end of a process whose hooks were not applied.

A small registry stands in for SGLang's: the tests run without SGLang.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import types
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from r2serve.engines import flag, sglang
from r2serve.engines.sglang import hooks
from r2serve.engines.sglang.table import Hook
from r2serve.errors import ConfigError

AROUND = "tests_engine.groups.reduce"
AFTER = "tests_engine.groups.Group.join"


class HookType(Enum):
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


class Registry:
    """Hooks like SGLang's registry, and logs no error."""

    registered: ClassVar[list[tuple[str, Callable[..., Any], HookType]]] = []
    skipped: ClassVar[set[str]] = set()
    """Targets whose hooks fail to apply."""
    apply_hooks: ClassVar[Callable[[], None]]

    @classmethod
    def register(cls, target: str, hook: Callable[..., Any], kind: HookType) -> None:
        cls.registered.append((target, hook, kind))

    @classmethod
    def apply(cls) -> None:
        for target, hook, _ in cls.registered:
            if target not in cls.skipped:
                owner, _, name = target.rpartition(".")
                setattr(hooks._owner(owner), name, hook)


class Group:
    @staticmethod
    def join(parser: object) -> None: ...


def reduce(value: int) -> int:
    return value


def around(original: Callable[[int], int], value: int) -> int:
    return original(value) + 1


@pytest.fixture
def resolution(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Puts a small engine in place of SGLang; returns the names of its configuration steps."""
    names: list[str] = []
    Registry.registered.clear()
    Registry.skipped.clear()
    Registry.apply_hooks = Registry.apply
    mine = types.ModuleType("tests_engine.groups")
    mine.reduce, mine.Group = reduce, type("Group", (), dict(vars(Group)))  # type: ignore[attr-defined]

    def register_resolution_hook(name: str) -> Callable[[Any], Any]:
        names.append(name)
        return lambda function: function

    modules = {
        "tests_engine": types.ModuleType("tests_engine"),
        "tests_engine.groups": mine,
        "sglang.srt.plugins.hook_registry": SimpleNamespace(
            HookRegistry=Registry, HookType=HookType
        ),
        "sglang.srt.arg_groups.resolution_hooks": SimpleNamespace(
            register_resolution_hook=register_resolution_hook
        ),
    }
    for name in modules:
        parts = name.split(".")
        for count in range(1, len(parts)):
            package = types.ModuleType(".".join(parts[:count]))
            package.__path__ = []
            monkeypatch.setitem(sys.modules, package.__name__, package)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(modules["tests_engine"], "groups", mine, raising=False)
    table = (
        Hook(AROUND, "AROUND", f"{__name__}:around"),
        Hook(AFTER, "AFTER", f"{__name__}:around"),
    )
    monkeypatch.setattr(hooks, "HOOKS", table)
    monkeypatch.setattr(hooks, "_problem", None)
    for variable in (flag.VARIABLE, flag.SPANS_VARIABLE):
        monkeypatch.setenv(variable, "")  # restored after the test
        monkeypatch.delenv(variable)
    return names


def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(flag.VARIABLE, "r2ccl")
    monkeypatch.setattr(hooks, "PYNCCL", Hook(AROUND, "AROUND", f"{__name__}:around"))


def test_every_hook_of_the_table_is_registered(resolution: list[str]) -> None:
    hooks.install()
    Registry.apply_hooks()
    assert [(target, kind) for target, _, kind in Registry.registered] == [
        (AROUND, HookType.AROUND),
        (AFTER, HookType.AFTER),
    ]
    assert resolution == ["handle_other_validations"]
    hooks.check_available()


def test_applied_hooks_let_the_engine_start(
    resolution: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen(monkeypatch)
    hooks.install()
    Registry.apply_hooks()
    assert len(Registry.registered) == 3  # the class of GPUs, too
    assert Registry.apply_hooks == Registry.apply, "later calls are SGLang's own"


def test_a_hook_that_was_not_applied_ends_the_process(
    resolution: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen(monkeypatch)
    Registry.skipped.add(AFTER)
    hooks.install()
    with pytest.raises(SystemExit, match=f"not applied the hooks of {AFTER};"):
        Registry.apply_hooks()


def test_a_hook_without_a_target_ends_the_process(
    resolution: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen(monkeypatch)
    gone = Hook("tests_engine.groups.gone", "AROUND", f"{__name__}:around")
    monkeypatch.setattr(hooks, "HOOKS", (gone,))
    with pytest.raises(SystemExit, match=r"AttributeError.*gone.*would serve without resilience"):
        hooks.install()
    assert not Registry.registered


def test_the_flag_is_refused_when_a_hook_is_missing(resolution: list[str]) -> None:
    """Without the flag nothing ends: a user of SGLang alone does not miss the hook."""
    Registry.skipped.add(AROUND)
    hooks.install()
    Registry.apply_hooks()
    parser = argparse.ArgumentParser(exit_on_error=False)
    hooks.add_flag(None, parser)
    with pytest.raises(argparse.ArgumentError, match=f"not applied the hooks of {AROUND}"):
        parser.parse_args(["--distributed-backend", "r2ccl"])
    assert flag.VARIABLE not in os.environ
    assert parser.parse_args(["--distributed-backend", "default"]).distributed_backend == "default"


def test_the_flag_is_carried_to_child_processes(resolution: list[str]) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    hooks.add_flag(None, parser)
    hooks.add_flag(None, parser)  # SGLang may prepare a parser twice
    parser.parse_args(["--distributed-backend", "r2ccl"])
    assert flag.active()
    with pytest.raises(argparse.ArgumentError, match="invalid choice: 'r2cl'"):
        parser.parse_args(["--distributed-backend", "r2cl"])


def test_a_wrong_option_of_r2ccl_is_refused_with_the_flag(
    resolution: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("R2CCL_SLOTS", "3")
    with pytest.raises(ConfigError, match="R2CCL_SLOTS"):
        hooks.check_available()


def test_a_child_process_without_the_choice_gets_no_hooks(
    resolution: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    sglang.register()
    assert not Registry.registered
    chosen(monkeypatch)
    sglang.register()
    assert Registry.registered


def test_a_module_that_fails_to_import_keeps_its_reason(
    resolution: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tests_half_installed.py").write_text("import tests_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    chosen(monkeypatch)
    half = Hook("tests_half_installed.Scheduler.step", "AROUND", f"{__name__}:around")
    monkeypatch.setattr(hooks, "HOOKS", (half,))
    with pytest.raises(SystemExit, match="No module named 'tests_not_installed'"):
        hooks.install()
