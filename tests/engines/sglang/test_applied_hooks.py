"""The plugin in the installed SGLang: all hooks are applied; a missing hook ends the process."""

from __future__ import annotations

import re

import pytest
from sglang_environment import run

pytestmark = pytest.mark.long

PLAIN = """
from sglang.srt.plugins import load_plugins
load_plugins()
"""
LOAD = f"""
{PLAIN}
from r2serve.engines.sglang.table import HOOKS, PYNCCL
from r2serve.engines.sglang import hooks
for hook in (*HOOKS, PYNCCL):
    found = hooks._resolved(hook.target)
    found = getattr(found, "__func__", found)
    ours = hook.load()
    applied = found is ours or getattr(found, "__wrapped__", None) is not None
    print(hook.target, "applied" if applied else "NOT applied")
"""
BROKEN = """
from r2serve.engines.sglang import table
target = "sglang.srt.managers.scheduler.Scheduler.gone"
gone = table.Hook(target, "AROUND", table.HOOKS[-1].function)
table.HOOKS = (*table.HOOKS, gone)
"""
SKIPPED = """
from sglang.srt.plugins.hook_registry import HookRegistry
HookRegistry._patched.add("sglang.srt.managers.scheduler.Scheduler.run_batch")
"""


def test_every_hook_is_applied_with_the_choice() -> None:
    told = run(LOAD, R2SERVE_DISTRIBUTED_BACKEND="r2ccl")
    assert told.returncode == 0, told.stderr
    lines = [line for line in told.stdout.splitlines() if line.endswith("applied")]
    assert len(lines) == 13
    assert not [line for line in lines if line.endswith("NOT applied")]


def test_without_the_choice_gpus_keep_nccl() -> None:
    told = run(LOAD, R2SERVE_DISTRIBUTED_BACKEND="default")
    assert told.returncode == 0, told.stderr
    refused = [line for line in told.stdout.splitlines() if line.endswith("NOT applied")]
    assert len(refused) == 1
    assert "PyNcclCommunicator" in refused[0]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (BROKEN, "AttributeError: gone"),
        (SKIPPED, "SGLang has not applied the hooks of .*Scheduler.run_batch"),
    ],
    ids=["no target", "not applied"],
)
def test_a_broken_hook_ends_the_process(fault: str, says: str) -> None:
    """SGLang logs the errors of plugins, and goes on."""
    told = run(fault + LOAD, R2SERVE_DISTRIBUTED_BACKEND="r2ccl")
    assert told.returncode == 1
    assert "serve without resilience" in told.stderr
    assert re.search(says, told.stderr), told.stderr
    calm = run(fault + PLAIN, R2SERVE_DISTRIBUTED_BACKEND="default")
    assert calm.returncode == 0, "without the choice nothing is lost"


FLAG = """
import sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
prepare_server_args(["--model-path", "none", *sys.argv[1:]])
import os
print("backend", os.environ.get("R2SERVE_DISTRIBUTED_BACKEND"))
"""


@pytest.mark.parametrize(
    ("words", "variables", "says"),
    [
        (("--distributed-backend", "r2cl"), {}, "invalid choice: 'r2cl'"),
        (("--distributed-backend", "r2ccl"), {"R2CCL_SLOTS": "3"}, "R2CCL_SLOTS"),
        (("--distributed-backend", "r2ccl", "--r2serve-sidecar", "x"), {}, "[HOST:]PORT"),
    ],
)
def test_a_wrong_flag_is_refused(
    words: tuple[str, ...], variables: dict[str, str], says: str
) -> None:
    told = run(FLAG, *words, **variables)
    assert told.returncode == 2, told.stdout
    assert says in told.stderr


def test_the_flag_reaches_the_environment() -> None:
    told = run(FLAG, "--distributed-backend", "r2ccl")
    assert told.returncode == 0, told.stderr
    assert "backend r2ccl" in told.stdout
