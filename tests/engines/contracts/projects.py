"""The projects with releases to check: rows, and the recorded facts of each release."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r2serve.engines.sglang import relies_on as sglang_rows
from r2serve.engines.torch import relies_on as torch_rows
from r2serve.engines.vllm import relies_on as vllm_rows
from r2serve.kernels import relies_on as triton_rows
from r2serve.seams import Row

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Project:
    """A PyPI package with rows and releases to check."""

    name: str
    rows: tuple[Row, ...]
    releases: tuple[str, ...]


@dataclass(frozen=True)
class Kept:
    """The facts of a release, with name and SHA-256 of the wheel."""

    wheel: str
    sha256: str
    facts: dict[str, Any]


PROJECTS = (
    Project("vllm", vllm_rows.ROWS, vllm_rows.RELEASES),
    Project("sglang", sglang_rows.ROWS, sglang_rows.RELEASES),
    Project("torch", torch_rows.ROWS, torch_rows.RELEASES),
    Project("triton", triton_rows.ROWS, triton_rows.RELEASES),
)


def releases() -> Iterator[tuple[Project, str]]:
    for project in PROJECTS:
        for release in project.releases:
            yield project, release


def file_of(project: Project, release: str) -> Path:
    return FOLDER / f"{project.name}-{release}.json"


def load(project: Project, release: str) -> Kept:
    return Kept(**json.loads(file_of(project, release).read_text()))


def save(project: Project, release: str, kept: Kept) -> None:
    """Writes the file with a line per subject, so that a diff shows the changed subject."""
    lines = [f"  {json.dumps(name)}: {json.dumps(fact)}" for name, fact in kept.facts.items()]
    file_of(project, release).write_text(
        "{\n"
        f' "wheel": {json.dumps(kept.wheel)},\n'
        f' "sha256": {json.dumps(kept.sha256)},\n'
        ' "facts": {\n' + ",\n".join(lines) + "\n }\n}\n"
    )


def judge(project: Project, release: str, row: Row, facts: dict[str, Any]) -> None:
    """Compares a row with facts.

    Raises:
        AssertionError: names the release, the row and the change.
    """
    where = f"{project.name} {release}, row {row.seam!r}"
    unknown = [each.subject for each in row.expects if each.subject not in facts]
    assert not unknown, (
        f"{where}: no facts about {', '.join(unknown)}; the row is newer than the facts, so write "
        f"them again: python -m contracts.extract {project.name}=={release} (in tests/engines)"
    )
    broken = row.broken(facts)
    assert not broken, f"{where} does not hold ({row.purpose}):\n  " + "\n  ".join(broken)
