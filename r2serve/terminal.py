"""Pieces shared by commands: their numbers, their tables, and their end by Ctrl-C."""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import click
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Column, Table

WIDE = 110
"""Columns of a terminal from which tables have further columns."""
_PIPE_WIDTH = 10_000
_GAP = 2
"""Columns of a terminal between two columns of a table."""
_NARROWEST_TEXT = 8
"""Columns of a terminal for a text below which all cells are folded alike."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as a shell has it: 128 and SIGINT's number."""

_F = TypeVar("_F", bound=Callable[..., Any])
_P = ParamSpec("_P")
_R = TypeVar("_R")


class FiniteRange(click.FloatRange):
    """A range of numbers; unlike click's, NaN and infinity lie outside."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number


def result_option(*names: str, help: str = "Write the results here.") -> Callable[[_F], _F]:
    """Adds an option with the path of a file to write at the end.

    A path that cannot be written is refused before the command runs.
    """
    path = click.Path(dir_okay=False, path_type=Path)
    return click.option(*names, type=path, callback=_writable, help=help)


def _writable(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    if path is None:
        return None
    existed = path.exists()
    try:
        path.open("ab").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise click.BadParameter(f"{path} cannot be written: {error.strerror}") from error
    return path


def ends_quietly(command: Callable[_P, _R]) -> Callable[_P, _R]:
    """Ends a command that runs until Ctrl-C without a complaint, with status INTERRUPTED."""

    @functools.wraps(command)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return command(*args, **kwargs)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(INTERRUPTED) from None

    return run


def console() -> Console:
    """Returns a console on standard output.

    The width is the terminal's or that of COLUMNS. A pipe gets whole lines instead: a folded line
    is hard to search.
    """
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return Console(highlight=False)
    return Console(highlight=False, width=_PIPE_WIDTH)


def is_wide(shown: Console) -> bool:
    """Whether a person reads a line of WIDE columns here; a pipe may end on a narrow terminal."""
    return WIDE <= shown.width < _PIPE_WIDTH


class _LastFoldsFirst(Table):
    """A table whose last column, a text, is folded before any other column."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        def width_of(column: Column) -> int:
            cells = (column.header, *column.cells)
            return max(Measurement.get(console, options, cell).maximum for cell in cells)

        others = self.columns[:-1]
        width = sum(width_of(column) + _GAP for column in others) + _NARROWEST_TEXT
        for column in others:
            column.no_wrap = width <= options.max_width  # without room, rich cuts
        yield from super().__rich_console__(console, options)


def table(*columns: str, numbers: Collection[str] = (), title: str = "") -> Table:
    """Returns a table that folds a cell rather than to cut it; ``numbers`` are set to the right."""
    made = _LastFoldsFirst(
        title=escape(title) or None,
        title_justify="left",
        box=None,
        padding=(0, _GAP, 0, 0),
        pad_edge=False,
    )
    for column in columns:
        made.add_column(column, overflow="fold", justify="right" if column in numbers else "left")
    return made
