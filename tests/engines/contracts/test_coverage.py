"""What our sources use of other projects has a row, as far as the syntax tells."""

from __future__ import annotations

from pathlib import Path

import pytest
from contracts.projects import PROJECTS, Project, load
from contracts.uses import bases, covered, methods, used

from r2serve.engines.seams import Subclass, Takes
from r2serve.engines.vllm import patches

ROOT = Path(__file__).resolve().parents[3]
VLLM = sorted((ROOT / "r2serve/engines/vllm").glob("*.py"))
COMMUNICATORS = tuple(patches.COMMUNICATORS)

# Classes of ours whose base the syntax does not tell: a function makes them, or they are mixed in.
MADE = {
    "R2cclPlatform": tuple(patches.PLATFORMS),
    "R2cclWorker": tuple(patches.WORKERS),
    "SpanningCollectives": COMMUNICATORS,
    "SpanningCpuCommunicator": COMMUNICATORS,
    "SpanningCudaCommunicator": COMMUNICATORS,
}

USERS = {
    "vllm": (VLLM, ("vllm",)),
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


def subclasses() -> dict[str, tuple[str, ...]]:
    """Our classes in the plugin, with the classes of vLLM that they extend."""
    found = dict(MADE)
    for file in VLLM:
        for name, listed in bases(file).items():
            of_vllm = tuple(base for base in listed if base.startswith("vllm."))
            if of_vllm:
                found[name] = of_vllm
    return found


def test_classes_that_we_subclass_have_a_row() -> None:
    rows = {e.subject for r in patches.ROWS for e in r.expects if isinstance(e, Subclass)}
    missing = {base for listed in subclasses().values() for base in listed} - rows
    assert not missing
    assert len(rows) >= 10


@pytest.mark.parametrize("release", patches.RELEASES)
def test_methods_that_we_override_have_a_row(release: str) -> None:
    """Also one that vLLM adds under a name that ours has had: it would be overridden unseen."""
    facts = load(PROJECTS[0], release).facts
    stated = {e.subject for r in patches.ROWS for e in r.expects if isinstance(e, Takes)}
    checked = set()
    defined = {name: own for file in VLLM for name, own in methods(file).items()}
    for name, listed in subclasses().items():
        for base in listed:
            overridden = defined[name] & set(facts[base]["methods"])
            checked |= {f"{base}.{method}" for method in overridden}
    missing = sorted(checked - stated)
    assert not missing, f"vLLM {release}: no row says what these take: {missing}"
    assert len(checked) >= 50


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
    uncovered = {name for name in used(source, ("vllm",)) if not covered(name, patches.ROWS)}
    assert uncovered == {
        "vllm.distributed.get_pp_group",
        "vllm.distributed.parallel_state.get_world_group",
        "vllm.platforms.current_platform.is_rocm",
        "vllm.ir.ops.rms_norm",
    }
