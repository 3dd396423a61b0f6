"""Measures line and branch coverage of the quick tests: gcov (core), coverage.py (package).

cover.py native|python [arguments of pytest]    measure
cover.py show                                   print the table

Results are in build/coverage. Each line is stored with the tests running it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from mutation import ROOT

FOLDER = ROOT / "build/coverage"
GCOVR = Path(sys.executable).with_name("gcovr")
MEASURED = ["--filter", "csrc/", "--exclude", "csrc/bindings/"]


def native() -> int:
    """Runs each native program separately, so that its lines are recorded separately."""
    programs = sorted(FOLDER.glob("*_test"))
    reports = FOLDER / "native"
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir()
    failed = 0
    for program in programs:
        counts = FOLDER / "counts" / program.name
        shutil.rmtree(counts, ignore_errors=True)
        counts.mkdir(parents=True)
        environment = {**os.environ, "GCOV_PREFIX": str(counts), "R2SERVE_SWEEP": ""}
        environment["GCOV_PREFIX_STRIP"] = str(len(FOLDER.parts) - 1)
        done = subprocess.run([str(program), "--gtest_brief=1"], env=environment, check=False)
        failed += done.returncode != 0
        ran = {path.name for path in counts.rglob("*.gcda")}
        for notes in (FOLDER / "CMakeFiles").rglob("*.gcno"):
            if notes.with_suffix(".gcda").name in ran:
                beside = counts / notes.relative_to(FOLDER)
                beside.parent.mkdir(parents=True, exist_ok=True)
                beside.symlink_to(notes)
        report = reports / f"{program.name}.json"
        _gcovr("--json", str(report), str(counts))
    return 1 if failed else 0


def _gcovr(*arguments: str) -> None:
    command = [str(GCOVR), "--root", str(ROOT), *MEASURED, "-j", str(os.cpu_count() or 1)]
    command += ["--gcov-ignore-errors=no_working_dir_found", *arguments]
    subprocess.run(command, cwd=ROOT, check=True, stderr=subprocess.DEVNULL)


def python(arguments: Sequence[str]) -> int:
    """Runs pytest's default choice of tests, or the tests in `arguments`."""
    for old in FOLDER.glob("python.sqlite*"):
        old.unlink()
    FOLDER.mkdir(parents=True, exist_ok=True)
    # R2SERVE_ROOT lets processes in other working directories name the same files.
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parent),
        "R2SERVE_ROOT": str(ROOT),
    }
    coverage = [sys.executable, "-m", "coverage"]
    tests = [*coverage, "run", "-m", "pytest", "-p", "contexts", *arguments]
    status = subprocess.run(tests, cwd=ROOT, env=environment, check=False).returncode
    report = ["json", "--quiet", "-o", str(FOLDER / "python.json")]
    for then in (["combine", "--quiet"], report):
        subprocess.run([*coverage, *then], cwd=ROOT, env=environment, check=True)
    return status


def show() -> int:
    """Prints the table by folder: number of lines and branches, and the share run by tests."""
    summary = FOLDER / "native.json"
    tracefiles = [f"--add-tracefile={each}" for each in (FOLDER / "native").glob("*.json")]
    if tracefiles:
        _gcovr(*tracefiles, "--json-summary", str(summary))
    rows: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for file, counts in [*_of_core(summary), *_of_package(FOLDER / "python.json")]:
        parts = Path(file).parts
        folder = "/".join(parts[:2]) if len(parts) > 2 else parts[0]
        for name in (folder, f"{parts[0]}, all"):
            rows[name] = [old + new for old, new in zip(rows[name], counts, strict=True)]
    sys.stdout.write(f"{'folder':28}{'lines':>8}{'run':>8}{'branches':>10}{'taken':>8}\n")
    for name, (lines, run, branches, taken) in sorted(rows.items()):
        sys.stdout.write(
            f"{name:28}{lines:8}{share(run, lines):>8}{branches:10}{share(taken, branches):>8}\n"
        )
    return 0


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _of_core(summary: Path) -> Iterator[tuple[str, list[int]]]:
    keys = ("line_total", "line_covered", "branch_total", "branch_covered")
    if summary.exists():
        for file in json.loads(summary.read_text(encoding="utf-8"))["files"]:
            yield file["filename"], [file[key] for key in keys]


def _of_package(report: Path) -> Iterator[tuple[str, list[int]]]:
    keys = ("num_statements", "covered_lines", "num_branches", "covered_branches")
    if report.exists():
        for name, file in json.loads(report.read_text(encoding="utf-8"))["files"].items():
            yield name, [file["summary"][key] for key in keys]


def main(arguments: Sequence[str]) -> int:
    match list(arguments):
        case ["native"]:
            return native()
        case ["python", *others]:
            return python(others)
        case ["show"]:
            return show()
    sys.stderr.write(f"{__doc__}")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
