"""Choices of the command line that take words of earlier releases, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import click


class Named(click.Choice[str]):
    """One of some names, or an old word for one, about which a note is printed."""

    def __init__(self, names: Iterable[str], canonical: Callable[[str], str]) -> None:
        super().__init__(list(names))
        self._canonical = canonical

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        name = self._canonical(value)
        found = super().convert(name, param, ctx)
        if name != value:
            click.echo(f"`{value}` is an old word for `{name}` and goes", err=True)
        return found
