"""The table of seams and releases: `python -m contracts.table [--write]`, in tests/engines."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from contracts.projects import FOLDER, PROJECTS, Project, load

from r2serve.seams import Row

PAGE = FOLDER / "README.md"
BEGIN = "<!-- table of seams: written by contracts.table -->\n"
END = "<!-- end of the table of seams -->\n"


def rendered() -> str:
    return "\n".join("\n".join(_section(project)) for project in PROJECTS)


def written() -> str:
    """Returns the table in the page."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


def _section(project: Project) -> Iterator[str]:
    facts = {release: load(project, release).facts for release in project.releases}
    yield f"### {project.name}"
    yield ""
    yield "| seam | what for | goes when | " + " | ".join(project.releases) + " |"
    yield "|---|---|---|" + "---|" * len(project.releases)
    for row in project.rows:
        cells = [_cell(row, release, facts[release]) for release in project.releases]
        yield f"| {row.seam} | {row.purpose} | {row.exit} | " + " | ".join(cells) + " |"
    yield ""


def _cell(row: Row, release: str, facts: dict[str, object]) -> str:
    """Returns the number of expectations met; a dash if the row does not apply to the release."""
    if release not in row.releases:
        return "-"
    broken = len(row.broken(facts))  # type: ignore[arg-type]
    met = f"{len(row.expects) - broken} of {len(row.expects)}"
    return f"**{met}**" if broken else met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="into the page; default: print")
    if not parser.parse_args().write:
        sys.stdout.write(rendered())
        return
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(before + BEGIN + rendered() + END + after)


if __name__ == "__main__":
    main()
