"""Command-line choices that also accept the names of earlier releases."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import click


class Named(click.Choice[str]):
    """A choice among names; an old name is accepted, and a note with the new name is printed."""

    def __init__(self, names: Iterable[str], canonical: Callable[[str], str]) -> None:
        super().__init__(list(names))
        self._canonical = canonical

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        name = self._canonical(value)
        found = super().convert(name, param, ctx)
        if name != value:
            click.echo(f"`{value}` is deprecated: use `{name}`", err=True)
        return found
