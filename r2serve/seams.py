"""Rows about seams to other projects, and the check whether a release breaks a row.

A row names a seam and has expectations. Expectations are checked against facts about classes,
functions and files in the sources of a release. ``tests/engines/contracts`` extracts the facts
from wheels and stores them, so a release is checked without an installation.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Fact = Mapping[str, Any]
"""Fields about one subject; ``tests/engines/contracts/facts.py`` lists them."""

Asks = Mapping[str, tuple[str, ...]]
"""Fields of a fact required by an expectation, each with the names to look for."""


@dataclass(frozen=True)
class Expectation:
    """A statement about one subject.

    ``subject`` is a qualified name, or ``file:PATTERN`` for a file inside the wheel.
    """

    subject: str

    def asks(self) -> Asks:
        """Returns the fields for the extractor to fill; every fact has the field ``is``, too."""
        return {}

    def broken(self, fact: Fact) -> str | None:
        """Returns the reason why ``fact`` breaks the expectation; None: the expectation holds."""
        raise NotImplementedError


@dataclass(frozen=True)
class There(Expectation):
    """The subject exists; with ``value``: a constant with this source text."""

    value: str | None = None

    def broken(self, fact: Fact) -> str | None:
        if self.value is None or fact.get("value") == self.value:
            return None
        return f"is {fact.get('value')}, expected {self.value}"


@dataclass(frozen=True)
class Has(Expectation):
    """The class has attributes with these names; inherited attributes count."""

    names: tuple[str, ...]

    def asks(self) -> Asks:
        return {"has": self.names}

    def broken(self, fact: Fact) -> str | None:
        missing = [name for name in self.names if name not in fact.get("has", ())]
        return f"has no {', '.join(missing)}" if missing else None


@dataclass(frozen=True)
class Takes(Expectation):
    """The function, or one of its overloads, has exactly these parameters.

    For functions that r2serve overrides or calls with all parameters.
    """

    parameters: str

    def broken(self, fact: Fact) -> str | None:
        found = fact.get("parameters", [])
        if self.parameters in found:
            return None
        return f"takes ({' | '.join(found)}), expected ({self.parameters})"


@dataclass(frozen=True)
class Accepts(Expectation):
    """The function, or one of its overloads, accepts the call made by r2serve.

    ``call`` lists the arguments; ``name=`` stands for a keyword argument, a bare name for a
    positional argument.
    """

    call: str

    def broken(self, fact: Fact) -> str | None:
        found = fact.get("parameters", [])
        if any(fits(parameters, self.call) for parameters in found):
            return None
        return f"takes ({' | '.join(found)}), does not accept ({self.call})"


@dataclass(frozen=True)
class Subclass(Expectation):
    """The class has exactly these abstract methods, which a subclass in r2serve defines."""

    abstract: tuple[str, ...] = ()

    def asks(self) -> Asks:
        return {"abstract": (), "methods": ()}

    def broken(self, fact: Fact) -> str | None:
        if fact["is"] != "class":
            return f"is a {fact['is']}, no class"
        found = sorted(fact.get("abstract", ()))
        if found == sorted(self.abstract):
            return None
        return f"abstract methods are {found}, the subclass defines {sorted(self.abstract)}"


@dataclass(frozen=True)
class StoodInFor(Expectation):
    """The class can be replaced by a stand-in, which defines ``method`` and forwards all else.

    The stand-in is not a subclass, so new abstract methods do not break it; they are only recorded.
    Python looks up special methods in the type, where a stand-in cannot forward them. So the class
    must define no special method except constructors.
    """

    method: str

    def asks(self) -> Asks:
        return {"has": (self.method,), "special": (), "abstract": ()}

    def broken(self, fact: Fact) -> str | None:
        if self.method not in fact.get("has", ()):
            return f"has no {self.method}"
        special = fact.get("special", ())
        return f"has {', '.join(special)}, which a stand-in does not forward" if special else None


@dataclass(frozen=True)
class InOrder(Expectation):
    """The body of the function contains all these marks, and first occurrences have this order.

    A mark is a dotted name, ``name=`` for a keyword argument, or a quoted string.
    """

    marks: tuple[str, ...]

    def asks(self) -> Asks:
        return {"order": self.marks}

    def broken(self, fact: Fact) -> str | None:
        found = [mark for mark in fact.get("order", ()) if mark in self.marks]
        return None if found == list(self.marks) else f"has {found}, expected {list(self.marks)}"


@dataclass(frozen=True)
class Says(Expectation):
    """The file contains these texts; blanks and C comments are ignored."""

    texts: tuple[str, ...]

    def asks(self) -> Asks:
        return {"texts": self.texts}

    def broken(self, fact: Fact) -> str | None:
        missing = [text for text in self.texts if text not in fact.get("texts", ())]
        return f"does not say {'; '.join(missing)}" if missing else None


@dataclass(frozen=True)
class Row:
    """A seam: purpose, condition for removal, expectations, and the releases to check."""

    seam: str
    purpose: str
    exit: str
    """Change, upstream or here, that makes the row unnecessary; empty: a public interface."""
    expects: tuple[Expectation, ...]
    releases: tuple[str, ...]
    """Releases to check against this row; another row may cover other releases."""

    def broken(self, facts: Mapping[str, Fact | None]) -> list[str]:
        """Returns the reasons why a release with these facts breaks the row; empty: the row holds.

        Raises:
            KeyError: ``facts`` lacks a subject, so the facts are older than the row.
        """
        reasons = []
        for expectation in self.expects:
            fact = facts[expectation.subject]
            why = "does not exist" if fact is None else expectation.broken(fact)
            if why is not None:
                reasons.append(f"{expectation.subject} {why}")
        return reasons


def fits(parameters: str, call: str) -> bool:
    """Whether a function with these parameters accepts the call."""
    positional: list[str] = []
    named: dict[str, str] = {}
    for argument in filter(None, (each.strip() for each in call.split(","))):
        if argument.endswith("="):
            named[argument[:-1]] = argument
        else:
            positional.append(argument)
    try:
        _signature(parameters).bind(*positional, **named)
    except TypeError:
        return False
    return True


def _signature(parameters: str) -> inspect.Signature:
    [function] = ast.parse(f"def f({parameters}): ...").body
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    kinds = inspect.Parameter
    places = [
        *((each.arg, kinds.POSITIONAL_ONLY) for each in given.posonlyargs),
        *((each.arg, kinds.POSITIONAL_OR_KEYWORD) for each in given.args),
    ]
    required = len(places) - len(given.defaults)
    made = [
        kinds(name, kind, default=kinds.empty if index < required else None)
        for index, (name, kind) in enumerate(places)
    ]
    if given.vararg is not None:
        made.append(kinds(given.vararg.arg, kinds.VAR_POSITIONAL))
    for keyword, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        is_required = kinds.empty if default is None else None
        made.append(kinds(keyword.arg, kinds.KEYWORD_ONLY, default=is_required))
    if given.kwarg is not None:
        made.append(kinds(given.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(made)
