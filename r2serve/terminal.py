"""Pieces shared by commands: their numbers, their tables, and their end by Ctrl-C."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import click

INTERRUPTED = 130
"""Exit status after Ctrl-C, as a shell has it: 128 and SIGINT's number."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


class FiniteRange(click.FloatRange):
    """A range of numbers; unlike click's, NaN and infinity lie outside."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number


def ends_quietly(command: Callable[_P, _R]) -> Callable[_P, _R]:
    """Ends a command that runs until Ctrl-C without a complaint, with status INTERRUPTED."""

    @functools.wraps(command)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return command(*args, **kwargs)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(INTERRUPTED) from None

    return run
