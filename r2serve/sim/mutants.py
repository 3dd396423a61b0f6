"""Planted bugs (mutants), which test the simulator's checks: an invariant must catch each bug.

A separate build of the core, in ``build/mutants`` of the source tree, contains the bugs. Each bug
runs in a separate process, so that a crash is reported as the result of the bug.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import click

SOURCES = Path(__file__).resolve().parents[2]
FOLDER = SOURCES / "build" / "mutants"
SOUND = "none"
"""No planted bug."""

_INVARIANT = re.compile(r"I[1-9]: ")


@dataclass(frozen=True)
class MutantResult:
    """Result of a planted bug."""

    name: str
    caught: bool
    seed: int
    """Seed of the violation; without violation the last seed, after a crash the first seed."""
    text: str
    """The violated invariant, or the reason why the bug counts as not caught."""


def build() -> Path:
    """Compiles the core with its mutants, and returns the library; fast if nothing has changed.

    Raises:
        click.ClickException: no source tree, a missing tool, or an error of the compiler.
    """
    if not (SOURCES / "CMakeLists.txt").is_file():
        raise click.ClickException(
            f"--mutants compiles the core, but {SOURCES} is no source tree: must be run from a "
            "clone of the repository"
        )
    options = ["-DR2CCL_MUTANTS=ON", "-DR2CCL_KERNELS=OFF"]
    options.append("-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O2 -DNDEBUG")
    options.append(f"-DPython_EXECUTABLE={sys.executable}")
    for command in (
        ["cmake", "-S", str(SOURCES), "-B", str(FOLDER), "-G", "Ninja", *options],
        ["cmake", "--build", str(FOLDER), "--target", "_core"],
    ):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            raise click.ClickException(
                f"--mutants needs {error.filename}, which is not installed"
            ) from None
        if done.returncode != 0:
            raise click.ClickException(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
    return next(FOLDER.glob("_core*.so"))


def load(library: Path) -> ModuleType:
    """Loads the core of another build, beside the core of this process."""
    loader = importlib.machinery.ExtensionFileLoader("_core", str(library))
    spec = importlib.util.spec_from_loader("_core", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():  # this process's core has registered the same class names
        warnings.simplefilter("ignore", RuntimeWarning)
        loader.exec_module(module)
    return module


def hunt(library: Path, mutant: str, first: int, count: int) -> dict[str, Any]:
    """Runs seeds in this process, which a mutant may crash, until an invariant breaks.

    Returns the seed and the violation; an empty violation and the last seed if none broke.
    """
    core = load(library)
    for seed in range(first, first + count):
        violations = core.simulate(seed, mutant)["violations"]
        if violations:
            return {"seed": seed, "violation": violations[0]}
    return {"seed": first + count - 1, "violation": ""}


def judge(library: Path, mutant: str, first: int, count: int) -> MutantResult:
    """Runs the seeds with a planted bug, or :data:`SOUND`, in a child process.

    A violation counts only if the same seed passes without the bug.
    """
    code = "import sys, json; from r2serve.sim import mutants; mutants.main(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(library), mutant, str(first), str(count)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        return MutantResult(mutant, False, first, f"crashed: {done.stderr.strip()[-300:]}")
    found = json.loads(done.stdout)
    caught = bool(_INVARIANT.match(found["violation"]))
    text = found["violation"] or "nothing was noticed"
    if caught and mutant != SOUND:
        without = judge(library, SOUND, found["seed"], 1)
        if without.text != "nothing was noticed":
            return MutantResult(
                mutant, False, found["seed"], f"fails without the bug, too: {without.text}"
            )
    return MutantResult(mutant, caught, found["seed"], text)


def main(arguments: list[str]) -> None:
    """Runs :func:`hunt` in the child process of :func:`judge`, and prints the result as JSON."""
    library, mutant, first, count = arguments
    click.echo(json.dumps(hunt(Path(library), mutant, int(first), int(count))))


def judge_all(
    library: Path, first: int, count: int, likely: Mapping[str, int]
) -> Iterator[MutantResult]:
    """Yields the result of every planted bug.

    ``likely``: seeds to try first, by bug. Without a violation, or without an entry, the search
    runs ``count`` seeds from ``first`` on.
    """
    for mutant in load(library).mutants():
        if mutant in likely:
            result = judge(library, mutant, likely[mutant], 1)
            if result.caught:
                yield result
                continue
        yield judge(library, mutant, first, count)
