"""Names, addresses and limits of a lab, without building a lab."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from r2serve.lab import lab, nodes


def test_a_lab_name_contains_its_owner_and_is_unique() -> None:
    first, second = lab.Lab(), lab.Lab()
    assert first.name != second.name
    assert lab.owner_pid(first.name) == os.getpid()
    assert lab.owner_pid(lab.lab_name(4711, 3)) == 4711


@pytest.mark.parametrize("name", ["", "r2serve-lab", "r2serve-lab-x-0", "other-lab-1-2", "a-b-c-d"])
def test_foreign_names_have_no_owner(name: str) -> None:
    assert lab.owner_pid(name) is None


def test_no_two_ports_share_an_address() -> None:
    addresses = [nodes.rail_address(rail, node) for rail in range(200) for node in range(200)]
    addresses += [nodes.management_address(node) for node in range(200)]
    assert len(set(addresses)) == len(addresses)
    assert all(0 <= int(part) <= 255 for address in addresses for part in address.split("."))


@pytest.mark.parametrize(("nodes", "rails"), [(0, 2), (2, 0), (201, 2), (2, 201)])
def test_impossible_sizes_are_refused(nodes: int, rails: int) -> None:
    with pytest.raises(ValueError, match="must be 1 to 200"):
        lab.Lab(nodes, rails)


def test_a_fault_needs_a_built_lab() -> None:
    with pytest.raises(ValueError, match="not one of the lab's 0 nodes"):
        lab.Lab().cut(0, 0)


def _process(proc: Path, pid: int, *arguments: str) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "cmdline").write_bytes(b"\0".join(a.encode() for a in arguments) + b"\0")


def test_only_holders_of_dead_makers_are_found(tmp_path: Path) -> None:
    script = str(Path(lab.__file__).with_name("namespaces.py"))
    _process(tmp_path, 10, "python", "demo")
    _process(tmp_path, 11, "python", script, "hold", "--name", "r2serve-lab-10-0-node0")
    _process(tmp_path, 12, "python", script, "hold", "--name", "r2serve-lab-99-0-switch")
    _process(tmp_path, 13, "python", "other.py", "hold", "--name", "r2serve-lab-99-0-switch")
    (tmp_path / "self").mkdir()
    assert lab.holders_of_dead_processes(tmp_path) == [(12, "r2serve-lab-99-0")]
