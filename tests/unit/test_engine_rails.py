"""Wrong names of rails are told by the first process of an engine, before any worker starts."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from r2serve.engines import rails
from r2serve.errors import ConfigError
from r2serve.ports import choice

ABSENT = "no-such-nic"


@pytest.fixture(autouse=True)
def no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAILS", "MANAGEMENT", "FALLBACK"):
        monkeypatch.delenv(f"R2CCL_{name}", raising=False)
    rails._check_names.cache_clear()


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        (
            {"R2CCL_RAILS": "203.0.113.77"},
            r"rails \(R2CCL_RAILS\) is '203\.0\.113\.77': .* no such",
        ),
        ({"R2CCL_RAILS": "127.0.0.1,auto"}, "'auto' among other entries"),
        ({"R2CCL_RAILS": ABSENT, "R2CCL_FALLBACK": "off"}, f"'{ABSENT}': .* this node has: "),
        ({"R2CCL_MANAGEMENT": ABSENT}, rf"management \(R2CCL_MANAGEMENT\) is '{ABSENT}'"),
    ],
    ids=["address", "auto", "no other way", "management"],
)
def test_rails_that_no_worker_could_use_are_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], says: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):  # an error is told each time
        with pytest.raises(ConfigError, match=says):
            rails.check()


@pytest.mark.parametrize("named", [ABSENT, f"127.0.0.1,{ABSENT}"])
def test_a_device_that_may_come_later_is_a_warning_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    said: Callable[[], list[str]],
    named: str,
) -> None:
    monkeypatch.setenv("R2CCL_RAILS", named)
    with caplog.at_level(logging.WARNING, logger="r2serve"):
        rails.check()
        rails.check()
    (line,) = said()
    assert line.startswith(f"rails (R2CCL_RAILS) is '{named}': it has '{ABSENT}'")


def test_without_names_the_interfaces_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_: object) -> list[object]:
        raise AssertionError("the interfaces were read")

    monkeypatch.setattr(choice, "list_interfaces", read)
    rails.check()
    monkeypatch.setenv("R2CCL_RAILS", "127.0.0.1")
    with pytest.raises(AssertionError):
        rails.check()


def test_a_kernel_that_lists_no_interfaces_leaves_the_check_to_the_workers(
    monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    def refused(*_: object) -> list[object]:
        raise PermissionError("no netlink, no ioctl")

    monkeypatch.setattr(choice, "list_interfaces", refused)
    monkeypatch.setattr(choice, "list_interfaces_by_ioctl", refused)
    monkeypatch.setenv("R2CCL_RAILS", ABSENT)
    rails.check()
    assert said() == []
