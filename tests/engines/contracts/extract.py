"""Writes the facts of releases from their wheels: `python -m contracts.extract`, in tests/engines.

Without an argument the command fetches every release: 4 GB, wheel by wheel.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from contracts.projects import file_of, releases, save
from contracts.wheels import fetched, read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "release", nargs="*", help="for example vllm==0.33.0; default: every release of the rows"
    )
    parser.add_argument(
        "--wheels", type=Path, help="folder with the wheels; default: the package index"
    )
    options = parser.parse_args()
    known = {f"{project.name}=={release}": (project, release) for project, release in releases()}
    for name in options.release:
        if name not in known:
            parser.error(f"{name}: no row names this release; must be one of {', '.join(known)}")
    for name in options.release or known:
        project, release = known[name]
        if options.wheels is None:
            with fetched(project, release) as wheel:
                kept = read(project, wheel)
        else:
            found = sorted(options.wheels.glob(f"{project.name}-{release}-*.whl"))
            if len(found) != 1:
                parser.error(f"--wheels {options.wheels}: has {len(found)} wheels of {name}")
            kept = read(project, found[0])
        save(project, release, kept)
        sys.stdout.write(f"{name}: {len(kept.facts)} facts in {file_of(project, release).name}\n")


if __name__ == "__main__":
    main()
