"""Runs the tests against each source mutation of a list, and prints the surviving mutations.

try_mutations.py cpp|python [NUMBER...]

All C++ mutations are compiled into a single build, build/mutations. An environment variable
activates a mutation. A Python mutation is written into the source while its tests run. The results
are in build/mutations/cpp.json or python.json. Exit status 1: a mutation survived, and the list
does not explain the survival with `equal`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from mutation import CHOSEN_BY, CPP_HEADER, FOLDER, ROOT, Mutation, in_cpp, in_python, load

BUILD = ROOT / "build/mutations"
SLACK_S = 30.0
"""A test counts as hung, and the mutation as caught, after 3 x its usual time plus this time."""
CPP_LONGEST_S = 600.0
PYTHON_LONGEST_S = 900.0


def build_cpp(mutations: Sequence[Mutation]) -> None:
    """Builds the native tests from a copy of the sources with all mutations."""
    tree = BUILD / "tree"
    files = subprocess.run(
        ["git", "ls-files", "csrc", "tests/native", "tests/guest/native", "CMakeLists.txt"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    of_file: defaultdict[str, list[Mutation]] = defaultdict(list)
    for mutation in mutations:
        of_file[mutation.file].append(mutation)
    for name in files:
        if Path(name).suffix not in (".cc", ".hpp", ".txt"):
            continue
        source = in_cpp(of_file[name], (ROOT / name).read_text(encoding="utf-8"))
        _write(tree / name, source)
    header = tree / "mutated.hpp"
    _write(header, CPP_HEADER)
    configure = ["cmake", "-S", str(tree), "-B", str(BUILD / "native"), "-G", "Ninja"]
    configure += ["-DR2CCL_TESTS=ON", "-DR2CCL_PYTHON=OFF", f"-DCMAKE_CXX_FLAGS=-include {header}"]
    configure += ["-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -g1"]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", str(BUILD / "native")], check=True)


def _write(path: Path, text: str) -> None:
    """Writes a file only if its text changes, to avoid recompiling."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def caught_by_cpp(mutation: Mutation, usual_s: dict[str, float]) -> str | None:
    """Returns the first test that fails with the mutation; None = the mutation survives."""
    for program in mutation.tests:
        if program not in usual_s:
            began = time.monotonic()
            if not _passes(program, {}, CPP_LONGEST_S):
                raise RuntimeError(f"{program} fails without a mutation")
            usual_s[program] = time.monotonic() - began
        chosen = {CHOSEN_BY: str(mutation.number)}
        if not _passes(program, chosen, 3 * usual_s[program] + SLACK_S):
            return program
    return None


def _passes(program: str, environment: dict[str, str], at_most_s: float) -> bool:
    command = [str(BUILD / "native" / program), "--gtest_brief=1"]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **environment},
            timeout=at_most_s,
            check=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def caught_by_python(mutation: Mutation) -> str | None:
    """Returns the first test that fails with the mutation; None = the mutation survives.

    Raises:
        RuntimeError: the source has uncommitted changes; an abort of this process could lose these.
    """
    path = ROOT / mutation.file
    if subprocess.run(["git", "diff", "--quiet", "--", mutation.file], cwd=ROOT).returncode:
        raise RuntimeError(f"{mutation.file}: commit it first")
    if not mutation.tests:
        return None
    right = path.read_text(encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider"]
    try:
        path.write_text(in_python(mutation, right), encoding="utf-8")
        done = subprocess.run(
            [*command, *mutation.tests],
            cwd=ROOT,
            timeout=PYTHON_LONGEST_S,
            check=False,
            capture_output=True,
            text=True,
        )
    except subprocess.TimeoutExpired:
        return "a hang"
    finally:
        path.write_text(right, encoding="utf-8")
    if done.returncode == 0:
        return None
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" ")[1] if failed else f"pytest's exit status {done.returncode}"


def main(arguments: Sequence[str]) -> int:
    match list(arguments):
        case [("cpp" | "python") as language, *numbers]:
            return run(language, {int(number) for number in numbers})
    sys.stderr.write(f"{__doc__}")
    return 2


def run(language: str, numbers: set[int]) -> int:
    mutations = load(FOLDER / f"{language}.json")
    usual_s: dict[str, float] = {}
    if language == "cpp":
        build_cpp(mutations)
    caught: dict[int, str | None] = {}
    for mutation in mutations:
        if numbers and mutation.number not in numbers:
            continue
        began = time.monotonic()
        by = caught_by_cpp(mutation, usual_s) if language == "cpp" else caught_by_python(mutation)
        caught[mutation.number] = by
        result = f"caught by {by}" if by else f"survives {mutation.equal or '(!)'}"
        sys.stdout.write(f"{mutation.text}\n    {result}, {time.monotonic() - began:.0f} s\n")
        sys.stdout.flush()
    BUILD.mkdir(parents=True, exist_ok=True)
    (BUILD / f"{language}.json").write_text(json.dumps(caught, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"caught {sum(by is not None for by in caught.values())}/{len(caught)}\n")
    return int(any(by is None and not mutations[n - 1].equal for n, by in caught.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
