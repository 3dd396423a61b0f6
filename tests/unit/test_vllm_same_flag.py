"""Ranks of one engine with and without --distributed-backend end with an error that names both."""

from __future__ import annotations

import json
import socket
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from r2serve.agreement import node_values
from r2serve.engines import flag
from r2serve.engines.vllm import same_flag
from r2serve.errors import ConfigError


@pytest.fixture
def store() -> HashStore:
    made = HashStore()
    made.set_timeout(timedelta(seconds=60))
    return made


def tell(store: HashStore, rank: int, value: str, host: str) -> None:
    store.set(same_flag._key(rank), json.dumps([value, host]))


@pytest.mark.parametrize("own", ["r2ccl", "default"])
def test_equal_choices_go_on(store: HashStore, monkeypatch: pytest.MonkeyPatch, own: str) -> None:
    monkeypatch.setenv(flag.VARIABLE, own)
    tell(store, 1, own, "b")
    same_flag.compare_over(store, 0, 2)


@pytest.mark.parametrize(("own", "other"), [("r2ccl", "default"), ("default", "r2ccl")])
def test_different_choices_are_named_on_both_nodes(
    store: HashStore, monkeypatch: pytest.MonkeyPatch, own: str, other: str
) -> None:
    monkeypatch.setenv(flag.VARIABLE, own)
    tell(store, 1, other, "b")
    with pytest.raises(ConfigError) as caught:
        same_flag.compare_over(store, 0, 2)
    text = str(caught.value)
    assert text.startswith("--distributed-backend (R2SERVE_DISTRIBUTED_BACKEND) is 'default' on ")
    assert f"{own!r} on rank 0 (host {socket.gethostname()})" in text
    assert f"{other!r} on rank 1 (host b)" in text


def test_a_rank_without_r2serve_is_named_by_ranks_with_the_flag_only(
    store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_flag, "WAIT_S", {"r2ccl": 0.05, "default": 0.05})
    monkeypatch.setenv(flag.VARIABLE, "default")
    same_flag.compare_over(store, 0, 2)
    monkeypatch.setenv(flag.VARIABLE, "r2ccl")
    with pytest.raises(ConfigError, match=r"'r2ccl' on rank 0 .* and unknown on rank 1: r2serve"):
        same_flag.compare_over(store, 0, 2)


@pytest.mark.case("22", "the nodes waited for each other, and named no value")
@pytest.mark.parametrize(("checksum", "other"), [("off", "on"), ("on", "off")])
def test_another_option_is_named_on_both_nodes(
    store: HashStore, monkeypatch: pytest.MonkeyPatch, checksum: str, other: str
) -> None:
    """An external launcher, and commands of data-parallel ranks, have no other comparison."""
    monkeypatch.setenv(flag.VARIABLE, "r2ccl")
    monkeypatch.setenv("R2CCL_CHECKSUM", other)
    tell(store, 1, "r2ccl", "b")
    theirs = node_values()
    store.set(same_flag._values_key(1), json.dumps(theirs))
    monkeypatch.setenv("R2CCL_CHECKSUM", checksum)
    with pytest.raises(ConfigError) as caught:
        same_flag.compare_over(store, 0, 2)
    assert str(caught.value) == (
        f"checksum (R2CCL_CHECKSUM) is {checksum!r} on rank 0 (host {socket.gethostname()}) and "
        f"{other!r} on rank 1 (host b): must be the same on every node"
    )
    assert json.loads(store.get(same_flag._values_key(0))) != theirs


def test_equal_options_go_on(store: HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(flag.VARIABLE, "r2ccl")
    tell(store, 1, "r2ccl", "b")
    store.set(same_flag._values_key(1), json.dumps(node_values()))
    same_flag.compare_over(store, 0, 2)


def test_a_process_without_a_group_has_nothing_to_compare() -> None:
    same_flag.compare()
