"""Names of other projects in our sources have a row, as far as the syntax shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from contracts.projects import PROJECTS, Project, load, releases
from contracts.uses import bases, covered, methods, used

from r2serve.engines.sglang import relies_on as sglang_rows
from r2serve.engines.sglang.table import HOOKS, PYNCCL, RESOLUTION_STEP
from r2serve.engines.vllm import relies_on as vllm_rows
from r2serve.seams import Subclass, Takes

ROOT = Path(__file__).resolve().parents[3]
PLUGINS = {
    name: sorted((ROOT / "r2serve/engines" / name).glob("*.py"))
    for name in ("vllm", "sglang", "torch")
}
EXTENDED = [project for project in PROJECTS if project.name in PLUGINS]
COMMUNICATORS = tuple(vllm_rows.COMMUNICATORS)
GROUP, WORK = ("torch.distributed.ProcessGroup",), ("torch.distributed.Work",)

# Our classes without a base in the syntax: created by a function, or mixed in.
MADE = {
    "vllm": {
        "R2cclPlatform": tuple(vllm_rows.PLATFORMS),
        "R2cclWorker": tuple(vllm_rows.WORKERS),
        "SpanningCollectives": COMMUNICATORS,
        "SpanningCpuCommunicator": COMMUNICATORS,
        "SpanningCudaCommunicator": COMMUNICATORS,
    },
    "sglang": {
        "SpanningPyNccl": (PYNCCL.target,),
        "SpanningCommunicator": (PYNCCL.target,),
    },
    "torch": {
        "Operations": GROUP,
        "R2cclGroup": GROUP,
        "R2cclWork": WORK,
        "StreamWork": WORK,
    },
}

USERS = {
    "vllm": (PLUGINS["vllm"], ("vllm",)),
    "sglang": (PLUGINS["sglang"], ("sglang",)),
    "torch": (
        [
            *(ROOT / "r2serve").rglob("*.py"),
            ROOT / "tests/unit/captured.py",
            ROOT / "bench/kernels/replay.py",
        ],
        ("torch.cuda", "torch.distributed", "torch.futures", "torch.library"),
    ),
    "triton": (
        [*(ROOT / "kernels").glob("*.py"), ROOT / "tests/kernels/compile_all.py"],
        ("triton",),
    ),
}


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.name)
def test_names_that_we_use_have_a_row(project: Project) -> None:
    files, prefixes = USERS[project.name]
    missing = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in files
        for name in used(file, prefixes)
        if not covered(name, project.rows)
    }
    assert not missing, f"no row is about {sorted(missing)}"


def _subclasses(project: Project, files: list[Path]) -> dict[str, tuple[str, ...]]:
    """Returns our classes, each with the project's classes it extends."""
    found = dict(MADE[project.name])
    for file in files:
        for name, listed in bases(file).items():
            of_project = tuple(base for base in listed if base.startswith(f"{project.name}."))
            if of_project:
                found[name] = of_project
    return found


@pytest.mark.parametrize("project", EXTENDED, ids=lambda project: project.name)
def test_classes_that_we_subclass_have_a_row(project: Project) -> None:
    missing = _without_row(project, PLUGINS[project.name])
    assert not missing, f"no row is about a subclass of {missing}"


def _without_row(project: Project, files: list[Path]) -> list[str]:
    rows = {e.subject for r in project.rows for e in r.expects if isinstance(e, Subclass)}
    extended = {base for listed in _subclasses(project, files).values() for base in listed}
    return sorted(extended - rows)


def test_a_subclass_without_a_row_is_found(tmp_path: Path) -> None:
    source = tmp_path / "ours.py"
    source.write_text(
        "def make():\n"
        "    from vllm.v1.outputs import AsyncModelRunnerOutput\n"
        "    class Checked(AsyncModelRunnerOutput): ...\n"
    )
    assert _without_row(PROJECTS[0], [source]) == ["vllm.v1.outputs.AsyncModelRunnerOutput"]


@pytest.mark.parametrize(
    ("project", "release"),
    [each for each in releases() if each[0] in EXTENDED],
    ids=lambda value: getattr(value, "name", value),
)
def test_methods_that_we_override_have_a_row(project: Project, release: str) -> None:
    """Our class would silently override a method added by a release under the same name."""
    facts = load(project, release).facts
    stated = {e.subject for r in project.rows for e in r.expects if isinstance(e, Takes)}
    defined = {name: own for file in PLUGINS[project.name] for name, own in methods(file).items()}
    overridden = {
        f"{base}.{method}"
        for name, listed in _subclasses(project, PLUGINS[project.name]).items()
        for base in listed
        for method in defined[name] & set(facts[base]["methods"])
    }
    missing = sorted(overridden - stated)
    assert not missing, f"{project.name} {release}: no row says what these take: {missing}"
    assert len(overridden) >= {"sglang": 12}.get(project.name, 25)


def test_a_use_without_a_row_is_found(tmp_path: Path) -> None:
    source = tmp_path / "ours.py"
    source.write_text(
        "from vllm.distributed import get_pp_group, parallel_state\n"
        "import vllm.ir.ops\n"
        "def f():\n"
        "    from vllm.platforms import current_platform\n"
        "    parallel_state.get_world_group().barrier()\n"
        "    current_platform.is_rocm()\n"
        "    vllm.ir.ops.rms_norm(vllm.ir.ops.fused_add_rms_norm)\n"
    )
    uncovered = {name for name in used(source, ("vllm",)) if not covered(name, vllm_rows.ROWS)}
    assert uncovered == {
        "vllm.distributed.get_pp_group",
        "vllm.distributed.parallel_state.get_world_group",
        "vllm.platforms.current_platform.is_rocm",
        "vllm.ir.ops.rms_norm",
    }


def test_every_hook_in_sglang_has_a_row() -> None:
    """A hook is named by a string, which the syntax does not show."""
    subjects = {e.subject for row in sglang_rows.ROWS for e in row.expects}
    in_sglang = [each for each in (*HOOKS, PYNCCL) if each.target.startswith("sglang.")]
    assert len(in_sglang) >= 9
    assert not [each.target for each in in_sglang if each.target not in subjects]
    outside = [each.target for each in HOOKS if each not in in_sglang]
    seams = {row.seam for row in sglang_rows.ROWS}
    assert not [target for target in outside if target not in seams]
    assert any(RESOLUTION_STEP in seam for seam in seams)
