"""Work beside the stages of `make test`: its weight, its end, and the native tests compiled so."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import beside
import gate_stages
import psutil
import pytest
from timely import timely

ROOT = Path(__file__).resolve().parents[2]

# The first compilation never ends; the second one begins after the first.
MAKEFILE = """
ahead-asan:
\techo $$$$ >first; test -e done || sleep 1000
ahead-tsan:
\techo $$$$ >second; sleep 1000
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "Makefile").write_text(MAKEFILE)
    (tmp_path / "build").mkdir()
    return tmp_path


def pid_in(file: Path) -> int:
    text = timely(lambda: file.exists() and file.read_text().strip(), f"{file.name} has begun")
    return int(text)


def test_compilers_beside_a_stage_have_the_lowest_weight_and_end_with_the_stage(
    tree: Path,
) -> None:
    with beside.compiled_ahead(tree, ["asan", "tsan"]):
        compiler = psutil.Process(pid_in(tree / "first"))
        assert compiler.nice() == beside.LOWEST
        assert os.getsid(compiler.pid) != os.getsid(0)
        file = Path(f"/proc/{compiler.pid}/autogroup")
        group = file.read_text() if file.exists() else ""
        # Other users may change the weights of ten sessions a second, all together.
        if group and os.geteuid() == 0:
            assert group.endswith(f" nice {beside.LOWEST}\n")
    assert not beside.is_alive(compiler)
    assert not (tree / "second").exists()


def test_a_variant_follows_another(tree: Path) -> None:
    (tree / "done").touch()
    with beside.compiled_ahead(tree, ["asan", "tsan"]):
        compiler = psutil.Process(pid_in(tree / "second"))
    assert not beside.is_alive(compiler)


def test_a_process_that_ignores_the_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "GRACE_S", 0.1)
    command = ["sh", "-c", "trap '' TERM; echo; while true; do sleep 1; done"]
    process = beside.start(command, 1, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as said:
        assert said.readline() == b"\n"  # the trap is set
        beside.end(process)
    assert process.returncode == -9


def test_only_variants_of_later_stages_are_compiled_beside_a_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stages = {each.name: each for each in gate_stages.STAGES}
    unit, alone = stages["unit"], stages["alone"]
    later = [stages[name] for name in ("engines", "asan", "tsan", "alone")]
    memory = SimpleNamespace(total=gate_stages.MEMORY_AHEAD)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert gate_stages.compiled_beside(unit, later) == ["asan", "tsan"]
    assert gate_stages.compiled_beside(unit, later[2:]) == ["tsan"]
    assert gate_stages.compiled_beside(alone, later) == []
    memory.total -= 1
    assert gate_stages.compiled_beside(unit, later) == []


def test_each_variant_compiled_ahead_has_a_target() -> None:
    lines = (ROOT / "Makefile").read_text().splitlines()
    for variant in gate_stages.COMPILED_AHEAD:
        assert any(line.startswith(f"ahead-{variant}:") for line in lines)
