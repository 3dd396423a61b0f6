"""The folder with journals and drill sockets of workers; commands read the same folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def default_folder() -> Path:
    """Returns the plugins' default folder for journals: in memory, one folder for each user."""
    return Path(f"/dev/shm/r2serve-{os.getuid()}")


def journal_folder(given: Path | None) -> Path:
    """Returns ``given``, else the folder of R2CCL_JOURNAL_DIR, else the plugins' default."""
    return given or Path(os.environ.get("R2CCL_JOURNAL_DIR") or default_folder())


def folder_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the option ``--journal-dir`` to a command."""
    import click  # workers import this module, too, and need no click

    return click.option(
        "--journal-dir",
        type=click.Path(file_okay=False, path_type=Path),
        help="Folder with the workers' journals. Default: R2CCL_JOURNAL_DIR, or else "
        f"{default_folder()}.",
    )(function)
