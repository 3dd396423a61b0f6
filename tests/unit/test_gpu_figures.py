"""Figures from GPUs in docs/kernels.md that are older than the code."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEADER = "| figures | code | measured with | since then |\n|---|---|---|---|\n"
ROW = re.compile(r"\| ([^|]+) \| ([^|]+) \| ([0-9a-f]{7}) \| ([^|]+) \|")


def git(*arguments: str) -> int:
    """Returns the exit status of a git command."""
    return subprocess.run(["git", "-C", str(ROOT), *arguments], check=False).returncode


def rows() -> list[tuple[str, list[str], str, str]]:
    """Returns figures, paths, commit and age of each row."""
    table = (ROOT / "docs" / "kernels.md").read_text().split(HEADER)[1].split("\n\n")[0]
    found = []
    for line in table.splitlines():
        row = ROW.fullmatch(line)
        assert row is not None, line
        figures, code, commit, since = row.groups()
        found.append((figures, re.findall(r"`([^`]+)`", code), commit, since))
    return found


def test_the_page_names_figures_that_are_older_than_the_code() -> None:
    measured = rows()
    assert measured
    for figures, paths, commit, since in measured:
        if git("cat-file", "-e", f"{commit}^{{commit}}"):
            pytest.skip("the checkout lacks old commits")
        assert paths, figures
        assert all((ROOT / path).exists() for path in paths), paths
        changed = git("diff", "--quiet", commit, "--", *paths)
        expected = f"not measured since {commit}" if changed else "unchanged"
        assert since == expected, f"{figures}: {', '.join(paths)}"
