"""Fetches wheels of other projects one by one, to be read without unpacking."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from contracts.facts import extract
from contracts.projects import Kept, Project
from contracts.sources import Sources

LIMIT_S = 540
"""Limit of a single download, in seconds; the largest wheel has 0.9 GB."""

# Facts must not depend on the machine, so Python 3.12 on x86-64 is fixed.
PYTHON = "3.12"
TAGS = (
    "manylinux_2_34_x86_64",
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux2014_x86_64",
)


class WheelError(Exception):
    """A wheel is not available; the message contains the output of pip."""


@contextmanager
def fetched(project: Project, release: str) -> Iterator[Path]:
    """Yields the wheel of a release; the wheel is removed at exit.

    Raises:
        WheelError: the package index has no wheel, or did not answer within `LIMIT_S`.
    """
    wanted = f"{project.name}=={release}"
    with tempfile.TemporaryDirectory(prefix="r2serve-contracts-") as folder:
        # A machine's constraints limit installations; pip installs nothing here.
        unbounded = Path(folder, "constraints.txt")
        unbounded.touch()
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
        command += ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
        command += [f"--platform={tag}" for tag in TAGS]
        command += ["--progress-bar=off", "--dest", folder, wanted]
        try:
            told = subprocess.run(
                command,
                env={**os.environ, "PIP_CONSTRAINT": str(unbounded)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            raise WheelError(
                f"{wanted}: no wheel within {LIMIT_S} s; pip wrote:\n{late.output}"
            ) from late
        wheels = list(Path(folder).glob("*.whl"))
        if told.returncode or len(wheels) != 1:
            raise WheelError(f"{wanted}: no wheel (status {told.returncode}):\n{told.stdout}")
        yield wheels[0]


def read(project: Project, wheel: Path) -> Kept:
    """Returns a wheel's facts about every subject of the project's rows."""
    with wheel.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    with closing(Sources(wheel)) as sources:
        return Kept(wheel.name, digest, extract(sources, project.rows))
