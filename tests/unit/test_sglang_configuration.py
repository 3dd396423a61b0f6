"""r2serve's step of SGLang's configuration: refused options, and paths around r2ccl."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from r2serve.engines import flag, releases
from r2serve.engines.sglang import configuration, node_values
from r2serve.errors import ConfigError


def options(**given: Any) -> SimpleNamespace:
    """Returns SGLang's defaults of the options that r2serve reads."""
    defaults: dict[str, Any] = {
        "attn_dp_size": 1,
        "disable_custom_all_reduce": False,
        "disaggregation_mode": "null",
        "elastic_ep_backend": None,
        "enable_mscclpp": False,
        "enable_symm_mem": False,
        "enable_torch_symm_mem": False,
        "enforce_disable_flashinfer_allreduce_fusion": False,
        "flashinfer_allreduce_fusion_backend": None,
        "moe_a2a_backend": "none",
        "nnodes": 2,
        "pre_warm_nccl": False,
        "use_ray": False,
    }
    return SimpleNamespace(**{**defaults, **given})


def test_only_paths_around_r2ccl_are_changed() -> None:
    assert configuration.changes(options()) == {
        "disable_custom_all_reduce": True,
        "enforce_disable_flashinfer_allreduce_fusion": True,
    }
    given = options(enable_mscclpp=True, flashinfer_allreduce_fusion_backend="auto")
    changed = configuration.changes(given)
    assert changed["enable_mscclpp"] is False
    assert changed["flashinfer_allreduce_fusion_backend"] is None
    settled = options(**configuration.BYPASSES)
    assert configuration.changes(settled) == {}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"use_ray": True}, "--use-ray is True: .*must be left out"),
        ({"elastic_ep_backend": "mooncake"}, "--elastic-ep-backend is 'mooncake', .*left out"),
    ],
)
def test_engines_without_hooks_are_refused(given: dict[str, Any], says: str) -> None:
    configuration.refuse(options())
    configuration.refuse(options(elastic_ep_backend="none"))
    with pytest.raises(ConfigError, match=says):
        configuration.refuse(options(**given))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"moe_a2a_backend": "deepep"}, "--moe-a2a-backend deepep exchanges tokens"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode prefill transfers"),
        ({"attn_dp_size": 2}, "--attn-dp-size 2 sends requests between nodes by ZMQ"),
    ],
)
def test_traffic_without_failover_is_named(
    given: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    configuration.warn(options())
    assert not caplog.records
    configuration.warn(options(**given))
    [record] = caplog.records
    assert says in record.getMessage()


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.5.23", True),
        ("0.5.23.post1", True),
        ("0.5.22", False),
        ("0.5.24", False),
        ("dev", False),
    ],
)
def test_another_release_of_sglang_is_named(
    version: str, supported: bool, caplog: pytest.LogCaptureFixture
) -> None:
    releases.warn_if_unsupported.cache_clear()
    releases.warn_if_unsupported("sglang", version)
    assert releases.is_supported("sglang", version) is supported
    lines = [each.getMessage() for each in caplog.records]
    assert len(lines) == (not supported)
    for line in lines:
        assert line.startswith(f"SGLang {version} is out of the range")
        assert "(sglang>=0.5.23,<0.5.24)" in line


@pytest.mark.parametrize("overrides", [None, SimpleNamespace(resolving_view=lambda args: args)])
def test_an_engine_without_the_flag_starts_under_any_release(
    monkeypatch: pytest.MonkeyPatch, overrides: Any
) -> None:
    """SGLang may lack the module, or the options that are compared."""
    monkeypatch.delenv(flag.VARIABLE, raising=False)
    monkeypatch.setattr(flag, "of_command_line", True)
    monkeypatch.setattr(node_values, "_started", False)
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups.overrides", overrides)
    own_step: list[Any] = []
    given = SimpleNamespace()
    configuration.resolve(given, own_step.append)
    assert own_step == [given]
