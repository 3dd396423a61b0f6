"""The configuration of an engine's groups goes from hand to hand, not through the environment."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest

from r2serve.config import Config
from r2serve.engines import flag
from r2serve.engines.torch import group as torch_groups
from r2serve.errors import InternalError


@pytest.mark.parametrize(
    ("given", "resolved"),
    [
        (None, "step"),
        ("auto", "step"),
        ("off", "off"),
        ("site-error", "site-error"),
    ],
)
def test_engines_compare_steps_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: str | None, resolved: str
) -> None:
    monkeypatch.delenv("R2CCL_CONSENSUS", raising=False)
    if given is not None:
        monkeypatch.setenv("R2CCL_CONSENSUS", given)
    before = dict(os.environ)
    config = flag.group_config()
    assert config.consensus == resolved
    assert config == Config.from_env(consensus=resolved)  # nothing else differs
    assert os.environ == before


@pytest.mark.parametrize("config", [None, Config(consensus="step", slots=16)])
def test_groups_of_torch_have_the_configuration_of_the_engine(
    monkeypatch: pytest.MonkeyPatch, config: Config | None
) -> None:
    taken: list[Config | None] = []

    def from_store(*_args: Any, config: Config | None, **_options: Any) -> None:
        taken.append(config)
        raise InternalError("no group is made")

    monkeypatch.setattr(torch_groups, "_config", None)
    torch_groups.use_config(config)
    monkeypatch.setattr(torch_groups.Communicator, "from_store", from_store)
    with pytest.raises(InternalError, match="no group is made"):
        torch_groups.R2cclGroup(None, 0, 2, timedelta(seconds=1), "group")
    assert taken == [config]
