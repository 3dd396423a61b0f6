"""Columns of a table, shown in a terminal and on a Markdown page from the same list."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich import box
from rich.table import Table

Entry = TypeVar("Entry")


@dataclass(frozen=True)
class Column(Generic[Entry]):
    """A column: the title, and a function from an entry to the text of a cell.

    left: the column is left-aligned in a terminal. page_only: the column is left out in a
    terminal, to save width. good: rates an entry. A terminal shows good cells green and bad cells
    red; a page shows bad cells bold.
    """

    title: str
    cell: Callable[[Entry], str]
    left: bool = False
    page_only: bool = False
    good: Callable[[Entry], bool] | None = None

    def in_terminal(self, entry: Entry) -> str:
        text = self.cell(entry)
        if self.good is None:
            return text
        return f"[{'green' if self.good(entry) else 'red'}]{text}[/]"

    def on_page(self, entry: Entry) -> str:
        text = self.cell(entry)
        return f"**{text}**" if self.good is not None and not self.good(entry) else text


def in_terminal(
    title: str,
    columns: Sequence[Column[Entry]],
    entries: Iterable[Entry],
    *,
    group_by: Callable[[Entry], object] | None = None,
) -> Table:
    """Returns a rich table.

    group_by: entries with the same key form a group; a group shows the first column's cell once.
    """
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0 if group_by else (0, 1))
    shown = [column for column in columns if not column.page_only]
    for column in shown:
        justify = "left" if column.left else "right"
        heading = column.title.replace(" ", "\n")
        table.add_column(heading, justify=justify, no_wrap=group_by is not None)  # type: ignore[arg-type]
    previous: object = None
    for number, entry in enumerate(entries):
        cells = [column.in_terminal(entry) for column in shown]
        group = group_by(entry) if group_by else number
        if group_by and number and group != previous:
            table.add_section()
        if number and group == previous:
            cells[0] = ""
        table.add_row(*cells)
        previous = group
    return table


def on_page(columns: Sequence[Column[Entry]], entries: Iterable[Entry]) -> str:
    """Returns a Markdown table."""
    lines = [
        [column.title for column in columns],
        ["---"] * len(columns),
        *([column.on_page(entry) for column in columns] for entry in entries),
    ]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
