"""The folder that workers put their journals and drill sockets in, and that commands look into."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def default_folder() -> Path:
    """Where the engine plugins keep journals unless told otherwise: in memory, for this user."""
    return Path(f"/dev/shm/r2serve-{os.getuid()}")


def journal_folder(given: Path | None) -> Path:
    """The folder that was named, or that of R2CCL_JOURNAL_DIR, or the plugins'."""
    return given or Path(os.environ.get("R2CCL_JOURNAL_DIR") or default_folder())


def folder_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds ``--journal-dir``."""
    import click  # workers come here, too, and need none

    return click.option(
        "--journal-dir",
        type=click.Path(file_okay=False, path_type=Path),
        help="Folder with the workers' journals.  Default: R2CCL_JOURNAL_DIR, or else "
        f"{default_folder()}.",
    )(function)
