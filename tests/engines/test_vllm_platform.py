"""The platform class: stock answers without the flag, r2ccl's answers with it; and the flag."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from vllm import platforms
from vllm.config import CompilationMode, ParallelConfig
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.argparse_utils import FlexibleArgumentParser

import r2serve.engines.vllm as plugin
from r2serve.engines import flag, nodes
from r2serve.engines.vllm import carried, relies_on
from r2serve.engines.vllm.platform import make_platform
from r2serve.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
Ours = make_platform(CpuPlatform, "R2cclCpuPlatform")


@pytest.fixture(autouse=True)
def nothing_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts each test without flag and options, and restores the environment afterwards."""
    for variable in carried.CARRIED:
        # makes monkeypatch restore the variable even if the test sets it
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    monkeypatch.setattr(nodes, "_latest_spans_nodes", False)


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(flag.VARIABLE, "r2ccl")


def parser() -> FlexibleArgumentParser:
    made = FlexibleArgumentParser()
    Ours.pre_register_and_update(made)
    return made


STOCK_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"


def engine_config(**additional: Any) -> SimpleNamespace:
    parallel = ParallelConfig(
        nnodes=2, tensor_parallel_size=4, master_addr="127.0.0.1", worker_cls=STOCK_WORKER
    )
    compilation = SimpleNamespace(
        mode=CompilationMode.VLLM_COMPILE, compile_sizes=None, pass_config=SimpleNamespace()
    )
    return SimpleNamespace(
        parallel_config=parallel,
        compilation_config=compilation,
        additional_config=additional,
        shutdown_timeout=0,
    )


@pytest.fixture
def no_stock_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips vLLM's part of check_and_update_config, which needs a whole engine configuration."""
    monkeypatch.setattr(CpuPlatform, "check_and_update_config", lambda config: None)


# ---- the chosen platform ----


@pytest.mark.parametrize("base", relies_on.PLATFORMS)
def test_register_subclasses_the_platform_picked_by_vllm(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes = {"cuda": lambda: None, "cpu": lambda: base}
    monkeypatch.setattr(platforms, "builtin_platform_plugins", probes)
    name = plugin.register()
    assert name is not None
    # vLLM's module for GPUs imports this extension of the GPU build.
    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("of this test"))
    ours = named(name)
    assert ours.__base__ is named(base)
    assert ours._enum is named(base)._enum


def named(qualified_name: str) -> Any:
    module, _, name = qualified_name.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(
    "picked", [[], ["vllm.platforms.rocm.RocmPlatform"], [*relies_on.PLATFORMS]]
)
def test_register_returns_none_without_a_supported_platform(
    picked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    probes = {name: (lambda name=name: name) for name in picked}
    monkeypatch.setattr(platforms, "builtin_platform_plugins", probes)
    assert plugin.register() is None


@pytest.mark.parametrize(("answer", "stays_out"), [("an.other.Platform", True), (None, False)])
def test_register_yields_to_another_platform_plugin(
    answer: str | None, stays_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rival = SimpleNamespace(name="rival", value="rival:register", load=lambda: lambda: answer)
    mine = EntryPoint("r2serve", "r2serve.engines.vllm:register", "vllm.platform_plugins")
    monkeypatch.setattr(plugin, "entry_points", lambda group: [rival, mine])
    assert (plugin.register() is None) is stays_out


def test_vllm_activates_the_plugin_and_loading_it_is_light() -> None:
    code = (
        "import sys, r2serve.engines.vllm;"
        "print([m for m in ('torch', 'vllm', 'numpy', 'r2serve._core') if m in sys.modules]);"
        "from vllm.platforms import current_platform;"
        "print(type(current_platform).__name__, 'r2serve._core' in sys.modules)"
    )
    environment = {k: v for k, v in os.environ.items() if k not in carried.CARRIED}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    light, activated = done.stdout.splitlines()[-2:]
    assert light == "[]"
    assert activated in ("R2cclCpuPlatform False", "R2cclZenCpuPlatform False")


# ---- without the flag ----


def test_without_the_flag_every_answer_is_stock() -> None:
    stock = CpuPlatform()
    ours = Ours()
    assert ours.get_device_communicator_cls() == stock.get_device_communicator_cls()
    assert ours.use_custom_op_collectives() is stock.use_custom_op_collectives()
    assert ours.device_count() == stock.device_count() == torch.cpu.device_count()


@pytest.mark.usefixtures("no_stock_update")
def test_without_the_flag_the_engine_configuration_is_left_alone() -> None:
    config = engine_config(other=1)
    Ours.check_and_update_config(config)
    assert config.additional_config == {"other": 1}
    assert carried.WORKERS_VARIABLE not in os.environ


def test_wrong_options_do_not_matter_without_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R2CCL_SLOTS", "many")
    Ours.pre_register_and_update()
    parser().parse_args([])


# ---- with the flag ----


@pytest.mark.parametrize("spelling", ["--distributed-backend", "--distributed_backend"])
def test_the_flag_reaches_child_processes(spelling: str) -> None:
    arguments = parser().parse_args([spelling, "r2ccl"])
    assert arguments.distributed_backend == "r2ccl"
    assert flag.active()
    parser().parse_args([spelling, "default"])
    assert not flag.active()


def test_the_flag_has_an_argument_group_and_is_added_once() -> None:
    made = parser()
    Ours.pre_register_and_update(made)
    (group,) = [group for group in made._action_groups if group.title == "r2serve"]
    assert [action.dest for action in group._group_actions] == [
        "distributed_backend",
        "r2serve_sidecar",
    ]
    made._search_keyword = "r2serve"
    assert "--distributed-backend {default,r2ccl}" in made.format_help()


def test_a_wrong_option_stops_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("R2CCL_CHUNK_BYTES", "100000")
    with pytest.raises(SystemExit) as stopped:
        parser().parse_args(["--distributed-backend", "r2ccl"])
    assert stopped.value.code == 2
    assert "chunk_bytes (R2CCL_CHUNK_BYTES) is 100000: must be" in capsys.readouterr().err


def test_a_backend_that_does_not_exist_is_refused() -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--distributed-backend", "nccl"])


@pytest.mark.parametrize(("variable", "value"), [(flag.VARIABLE, "r2cl"), ("R2CCL_SLOTS", "3")])
@pytest.mark.usefixtures("asked_for")
def test_a_wrong_variable_stops_before_the_engine_is_configured(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=variable):
        Ours.pre_register_and_update()


@pytest.mark.usefixtures("asked_for")
def test_groups_get_our_communicator() -> None:
    module, _, name = Ours.get_device_communicator_cls().rpartition(".")
    ours = getattr(importlib.import_module(module), name)
    stock_module, _, stock_name = CpuPlatform.get_device_communicator_cls().rpartition(".")
    assert issubclass(ours, getattr(importlib.import_module(stock_module), stock_name))


@pytest.mark.usefixtures("asked_for")
def test_only_groups_that_span_nodes_use_custom_op_collectives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not Ours.use_custom_op_collectives()
    monkeypatch.setattr(nodes, "_latest_spans_nodes", True)
    assert Ours.use_custom_op_collectives()


class Cuda(CpuPlatform):  # type: ignore[misc]
    device_type = "cuda"
    dist_backend = "nccl"


@pytest.mark.usefixtures("asked_for", "no_stock_update")
def test_gpu_device_groups_use_r2ccl_if_the_engine_spans_nodes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours = make_platform(Cuda, "OursOnCuda")()
    assert ours.dist_backend == "nccl"
    config = engine_config()
    Ours.check_and_update_config(config)
    assert os.environ[flag.SPANS_VARIABLE] == "1"
    assert ours.dist_backend == "r2ccl"
    assert dist.is_backend_available("r2ccl")
    assert Ours().dist_backend == "gloo"
    monkeypatch.setenv("VLLM_DISTRIBUTED_USE_SPLIT_GROUP", "1")
    assert ours.dist_backend == "nccl"
    assert "without failover" in caplog.text
    config.parallel_config.nnodes = 1
    Ours.check_and_update_config(config)
    monkeypatch.delenv("VLLM_DISTRIBUTED_USE_SPLIT_GROUP")
    assert ours.dist_backend == "nccl"


def test_device_groups_are_stock_without_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(flag.SPANS_VARIABLE, "1")
    assert make_platform(Cuda, "OursOnCuda")().dist_backend == "nccl"


@pytest.mark.usefixtures("asked_for")
def test_a_platform_without_counterpart_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuPlatform, "get_device_communicator_cls", lambda: "some.Communicator")
    with pytest.raises(ConfigError, match=r"some\.Communicator"):
        Ours.get_device_communicator_cls()


@pytest.mark.usefixtures("asked_for", "no_stock_update")
def test_the_engine_configuration_separates_compile_caches_and_counts_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("R2CCL_NODE", "per-rank")
    config = engine_config(other=1)
    Ours.check_and_update_config(config)
    noted = {
        "distributed_backend": "r2ccl",
        "nnodes": 2,
        "per_rank_nodes": True,
        "fuse": "",
        "gpu_staging_bytes": "",
    }
    assert config.additional_config == {"other": 1, "r2serve": noted}
    assert Ours().device_count() == 2


@pytest.mark.usefixtures("no_stock_update")
def test_additional_config_sets_the_flag_without_a_command_line() -> None:
    config = engine_config(r2serve={"distributed_backend": "r2ccl"})
    Ours.check_and_update_config(config)
    assert flag.active()


@pytest.mark.usefixtures("no_stock_update")
def test_the_flag_wins_over_additional_config() -> None:
    parser().parse_args(["--distributed-backend", "default"])
    Ours.check_and_update_config(engine_config(r2serve={"distributed_backend": "r2ccl"}))
    assert not flag.active()


@pytest.mark.parametrize("section", ["r2ccl!", {"distributed_backend": "nccl"}, {}])
@pytest.mark.usefixtures("no_stock_update")
def test_a_wrong_additional_config_is_refused(section: object) -> None:
    with pytest.raises(ConfigError, match="additional_config"):
        Ours.check_and_update_config(engine_config(r2serve=section))


@pytest.mark.usefixtures("asked_for", "no_stock_update")
def test_compiler_passes_run_on_the_cpu_only_on_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock = CpuPlatform.get_pass_manager_cls()

    def as_vllm_does(config: Any) -> None:
        config.compilation_config.mode = CompilationMode.DYNAMO_TRACE_ONCE
        config.compilation_config.ir_enable_torch_wrap = False

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", as_vllm_does)
    for wanted, runs in (("auto", False), ("off", False), ("on", True)):
        monkeypatch.setenv("R2CCL_FUSE", wanted)
        config = engine_config()
        Ours.check_and_update_config(config)
        compilation = config.compilation_config
        assert compilation.pass_config.fuse_allreduce_rms is False
        assert (compilation.mode == CompilationMode.VLLM_COMPILE) is runs
        assert compilation.ir_enable_torch_wrap is runs
        assert (Ours.get_pass_manager_cls() == relies_on.PASS_MANAGER) is runs
        assert Ours.get_pass_manager_cls() in (stock, relies_on.PASS_MANAGER)


def test_ray_carries_the_choice_and_the_options() -> None:
    variables = Ours.additional_env_vars
    assert {flag.VARIABLE, carried.WORKERS_VARIABLE, "R2CCL_RAILS", "R2CCL_NODE"} <= set(variables)
    assert set(CpuPlatform.additional_env_vars) <= set(variables)


# ---- the command line ----


def test_vllm_serve_refuses_a_wrong_option_before_starting_workers(tmp_path: Path) -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("vllm"), "serve", tmp_path, "--distributed-backend=r2ccl"],
        env={**os.environ, "R2CCL_DEAD_DEADLINE_MS": "soon"},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 2
    assert "dead_deadline_ms (R2CCL_DEAD_DEADLINE_MS) is 'soon': must be" in done.stderr


def test_the_plugin_knows_its_own_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][plugin._GROUP] == {"r2serve": plugin._OUR_VALUE}


def test_unknown_class_names_stay_unknown() -> None:
    module = importlib.import_module("r2serve.engines.vllm.platform")
    with pytest.raises(AttributeError, match="R2cclTpuPlatform"):
        _ = module.R2cclTpuPlatform


def test_the_flag_can_be_added_to_a_plain_parser() -> None:
    plain = argparse.ArgumentParser()
    flag.add_to(plain)
    assert plain.parse_args([]).distributed_backend == "default"


def test_only_vllms_worker_classes_are_replaced(
    no_stock_update: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    said: Callable[[], list[str]],
) -> None:
    config = engine_config()
    monkeypatch.setenv(flag.VARIABLE, "default")
    Ours.check_and_update_config(config)
    assert config.parallel_config.worker_cls == STOCK_WORKER
    monkeypatch.setenv(flag.VARIABLE, "r2ccl")
    for _ in range(2):
        Ours.check_and_update_config(config)
        assert config.parallel_config.worker_cls == relies_on.WORKERS[STOCK_WORKER]
    assert said() == []
    config.parallel_config.worker_cls = "other.package.Worker"
    Ours.check_and_update_config(config)
    assert config.parallel_config.worker_cls == "other.package.Worker"
    assert "other.package.Worker is not supported" in caplog.text
