"""The folder with journals and drill sockets of workers; commands read the same folder."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any


def default_folder() -> Path:
    """Returns the plugins' default folder for journals: in memory, one folder for each user."""
    return Path(f"/dev/shm/r2serve-{os.getuid()}")


def journal_folder(given: Path | None) -> Path:
    """Returns ``given``, else the folder of R2CCL_JOURNAL_DIR, else the plugins' default."""
    return given or Path(os.environ.get("R2CCL_JOURNAL_DIR") or default_folder())


def believed_users(folder: Path) -> frozenset[int]:
    """Returns the users whose files in the folder a reader believes: root and this user.

    Root also believes the owner of a folder that it names. A folder ``r2serve-<uid>`` must belong
    to the user in its name, because any user may make a folder in /dev/shm first.

    Raises:
        PermissionError: the folder belongs to a stranger.
    """
    believed = {0, os.geteuid()}
    try:
        owner = folder.stat().st_uid
    except OSError:
        return frozenset(believed)  # no folder, and no files
    named = re.fullmatch(r"r2serve-(\d+)", folder.name)
    if os.geteuid() == 0 and (named is None or int(named[1]) == owner):
        believed.add(owner)
    if owner not in believed:
        raise PermissionError(
            f"{folder} belongs to user {owner}: nothing in it is believed, because it must belong "
            "to this user or root"
        )
    return frozenset(believed)


def folder_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the option ``--journal-dir`` to a command."""
    import click  # workers import this module, too, and need no click

    return click.option(
        "--journal-dir",
        type=click.Path(file_okay=False, path_type=Path),
        help="Folder with the workers' journals. Default: R2CCL_JOURNAL_DIR, or else "
        f"{default_folder()}.",
    )(function)
