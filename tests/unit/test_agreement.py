"""Values that all nodes share, and the sentence about a difference."""

from __future__ import annotations

import pytest

from r2serve.agreement import SAME, common_options, difference, node_place, node_values
from r2serve.config import Config
from r2serve.errors import ConfigError
from r2serve.variables import BACKEND

FLAG = f"--distributed-backend ({BACKEND})"


def test_a_node_without_the_flag_tells_its_choice_alone() -> None:
    assert node_values({BACKEND: "default", "R2CCL_SLOTS": "seven"}) == {FLAG: "default"}


def test_a_node_with_the_flag_tells_every_common_option() -> None:
    values = node_values({BACKEND: "r2ccl", "R2CCL_CHECKSUM": "1"})
    assert list(values)[:2] == [FLAG, "control (R2CCL_CONTROL)"]
    assert values["checksum (R2CCL_CHECKSUM)"] == "on"
    assert len(values) == 2 + len(common_options(Config()))
    with pytest.raises(ConfigError, match="R2CCL_SLOTS"):
        node_values({BACKEND: "r2ccl", "R2CCL_SLOTS": "seven"})


@pytest.mark.parametrize(("backend", "auto"), [({}, "off"), ({BACKEND: "r2ccl"}, "step")])
def test_the_automatic_comparison_equals_what_it_becomes(
    backend: dict[str, str], auto: str
) -> None:
    assert node_values(backend) == node_values(backend | {"R2CCL_CONSENSUS": auto})
    assert list(node_values({})) == list(node_values({BACKEND: "r2ccl"}))[2:]


def test_the_first_difference_is_a_sentence_and_others_are_names() -> None:
    own = {"a": "1", "b": "2", "c": "3", "d": "4", "e": "5", "f": "6"}
    here, there = node_place(0, "x"), node_place(1, "y")
    assert difference(own, here, own, there) == ""
    assert difference(own, here, own | {"c": "9"}, there) == (
        f"c is '3' on node 0 (host x) and '9' on node 1 (host y): {SAME}"
    )
    assert difference(own, here, dict.fromkeys(own, "0"), there) == (
        f"a is '1' on node 0 (host x) and '0' on node 1 (host y): {SAME} (also different: b, c, d)"
    )
    assert difference(own, here, {"z": "0"}, there) == ""
