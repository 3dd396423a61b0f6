"""Finds the tests running a line, from the results of `make coverage`."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

from mutation import ROOT

MOST = 20
"""Maximum number of tests for a mutation."""


class Covering:
    """The tests of each line.

    folder: results of `make coverage`. language: cpp or python.

    Raises:
        FileNotFoundError: there are no results.
    """

    def __init__(self, folder: Path, language: str) -> None:
        self._tests: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        if language == "cpp":
            self._read_cpp(folder / "native")
        else:
            self._read_python(folder / "python.sqlite")
        self._lines_of: Counter[str] = Counter(
            test for tests in self._tests.values() for test in tests
        )

    def _read_cpp(self, folder: Path) -> None:
        reports = sorted(folder.glob("*.json"))
        if not reports:
            raise FileNotFoundError(f"{folder}: no report; run `make coverage`")
        for report in reports:
            for file in json.loads(report.read_text(encoding="utf-8"))["files"]:
                for line in file["lines"]:
                    ran = self._tests[file["file"], line["line_number"]]
                    if line["count"]:
                        ran.add(report.stem)

    def _read_python(self, path: Path) -> None:
        import coverage

        if not path.exists():
            raise FileNotFoundError(f"{path}: run `make coverage`")
        data = coverage.CoverageData(str(path))
        data.read()
        for file in data.measured_files():
            name = Path(file).resolve().relative_to(ROOT).as_posix()
            for line, contexts in data.contexts_by_lineno(file).items():
                self._tests[name, line] |= {each.split("|")[-1] for each in contexts} - {""}

    def tests_of(self, file: str, line: int) -> tuple[str, ...]:
        """Returns at most MOST tests of a line; tests running fewer lines come first."""
        # The optimiser may merge a statement with the statement before, and leave it unmeasured.
        near = (self._tests.get((file, line - back)) for back in range(4))
        tests = next((found for found in near if found is not None), set())
        return tuple(sorted(tests, key=lambda test: (self._lines_of[test], test))[:MOST])
