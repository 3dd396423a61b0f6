"""Rails by index: names, the rails in use between two readings, and waits."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from r2serve.lab.rails import busiest_rail, rail_index, rails_in_use, wait_until

ROOT = Path(__file__).resolve().parents[2]


def test_rail_names() -> None:
    assert rail_index("rail3@node12") == 3
    assert rail_index("rail1") == 1  # a device of the lab
    for name in ("eth0", "rail", "rail1@", "rail1@mgmt", "rail1.100", "a rail1@node0"):
        with pytest.raises(ValueError, match="must be rail<i>@node<j> or rail<i>"):
            rail_index(name)


def test_rails_with_little_traffic_are_not_in_use() -> None:
    assert rails_in_use({0: 0, 1: 10, 2: 0}, {0: 1000, 1: 59, 2: 500}) == [0, 2]
    assert rails_in_use({0: 0, 1: 10}, {0: 1000, 1: 1010}) == [0, 1]
    assert rails_in_use({0: 7, 1: 7}, {0: 7, 1: 7}) == []


def test_the_busiest_rail_carried_most() -> None:
    before, after = Counter({0: 100, 1: 100}), Counter({0: 180, 1: 9000})
    assert busiest_rail(before, after) == (1, 8900)
    assert busiest_rail(after, after) is None
    assert busiest_rail({}, {}) is None
    assert busiest_rail({}, {2: 5}) == (2, 5)  # the first worker has just come


def test_a_wait_ends_with_the_condition_or_the_time() -> None:
    answers = iter([False, False, True])
    assert wait_until(lambda: next(answers), within_s=60, every_s=0.001)
    assert next(answers, None) is None
    assert not wait_until(lambda: False, within_s=0.01, every_s=0.001)
    assert wait_until(lambda: True, within_s=0, every_s=60)


def test_the_helpers_have_no_copy() -> None:
    """Other modules take a rail's index from here, and do not wait for rails by themselves."""
    names = {"rail_index", "rails_in_use", "busiest_rail", "in_use", "wait_until"}
    for folder in ("r2serve/lab", "r2serve/demo", "bench"):
        for path in (ROOT / folder).rglob("*.py"):
            if path == ROOT / "r2serve/lab/rails.py":
                continue
            tree = ast.parse(path.read_text())
            own = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert not own & names, f"{path}: {own & names}"
            assert 'removeprefix("rail")' not in path.read_text(), path
