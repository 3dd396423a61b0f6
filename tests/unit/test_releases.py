"""Ranks of different releases: an error on every rank that names both, before any link exists."""

from __future__ import annotations

from typing import Any

import pytest

from r2serve import __version__, _core, rendezvous
from r2serve.communicator import Communicator
from r2serve.config import Config
from r2serve.errors import ConfigError
from r2serve.ports.info import PortInfo, ProcessInfo

INFO = ProcessInfo(
    process=7,
    public_key=bytes(32),
    node="n",
    host="b",
    ports=(PortInfo("eth0", "10.0.0.2", 4000),),
    control=PortInfo("", "10.1.0.2", 4001),
    unix_name="r2ccl-7",
)


def make(change: Any) -> Communicator:
    """Makes the communicator of rank 0; rank 1 sends what `change` makes of its information."""

    def exchange(own: dict[str, Any]) -> list[dict[str, Any]]:
        assert list(own)[:2] == ["r2serve", "wire"]
        return [own, change(rendezvous.with_release(INFO.to_wire()))]

    return Communicator._make(exchange, "test", 0, Config(rails="127.0.0.1"), lambda: None, False)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"r2serve": "0.2.0"}, f"r2serve 0.2.0 (wire version {_core.wire_version})"),
        ({"wire": 99}, f"r2serve {__version__} (wire version 99)"),
        ({"r2serve": "0.2.0", "ports": "of another form"}, "r2serve 0.2.0"),
    ],
)
def test_another_release_is_an_error_that_names_both(other: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make(lambda info: info | other)
    said = str(raised.value)
    assert said.startswith("rank 1 (host b) runs " + text)
    assert f"with r2serve {__version__} (wire version {_core.wire_version}): all ranks" in said


def test_a_rank_without_a_release_is_named() -> None:
    with pytest.raises(ConfigError, match=r"rank 1 \(host b\) runs an r2serve that does not name"):
        make(lambda info: {key: info[key] for key in info if key != "r2serve"})


def test_unknown_fields_are_ignored() -> None:
    sent = INFO.to_wire()
    newer = sent | {"color": "red"}
    newer["ports"] = [port | {"speed": 400} for port in sent["ports"]]
    newer["control"] = sent["control"] | {"speed": 1}
    assert ProcessInfo.from_wire(newer) == INFO
