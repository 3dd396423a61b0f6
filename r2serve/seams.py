"""Rows about seams to other projects, and the judgement whether a release breaks a row.

A row names a seam and has expectations.  Expectations are judged on facts about classes, functions
and files in the sources of one release.  ``tests/engines/contracts`` extracts the facts from wheels
and keeps them, so a release is judged without an installation.
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
"""Fields of a fact needed by an expectation, each with the names to look for."""


@dataclass(frozen=True)
class Expectation:
    """A statement about one subject.

    ``subject`` is a qualified name, or ``file:PATTERN`` for a file inside the wheel.
    """

    subject: str

    def asks(self) -> Asks:
        """Fields for the extractor to fill, beside the field ``is`` of every fact."""
        return {}

    def broken(self, fact: Fact) -> str | None:
        """Reason why ``fact`` breaks the expectation; None: the expectation holds."""
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
    """The class has these attributes, inherited ones included."""

    names: tuple[str, ...]

    def asks(self) -> Asks:
        return {"has": self.names}

    def broken(self, fact: Fact) -> str | None:
        missing = [name for name in self.names if name not in fact.get("has", ())]
        return f"has no {', '.join(missing)}" if missing else None


@dataclass(frozen=True)
class Takes(Expectation):
    """We override the function, or pass all parameters: exactly these.

    A function with overloads has an overload with these parameters.
    """

    parameters: str

    def broken(self, fact: Fact) -> str | None:
        found = fact.get("parameters", [])
        if self.parameters in found:
            return None
        return f"takes ({' | '.join(found)}), expected ({self.parameters})"


@dataclass(frozen=True)
class Accepts(Expectation):
    """We call the function: the call fits the parameters.

    ``call`` lists the arguments; ``name=`` stands for a keyword, a bare name for a position.
    """

    call: str

    def broken(self, fact: Fact) -> str | None:
        found = fact.get("parameters", [])
        if any(fits(parameters, self.call) for parameters in found):
            return None
        return f"takes ({' | '.join(found)}), does not accept ({self.call})"


@dataclass(frozen=True)
class Subclass(Expectation):
    """We subclass the class and define these abstract methods; the class has no others."""

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
    """We do not subclass the class: a stand-in has a method of ours and forwards all else.

    Abstract methods are recorded and do no harm.  Python looks special methods up in the type, past
    a stand-in, so the class must have no special method beside constructors.
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
    """The body of the function mentions these, first mentions in this order.

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
    """The file says these; blanks and comments of C do not count."""

    texts: tuple[str, ...]

    def asks(self) -> Asks:
        return {"texts": self.texts}

    def broken(self, fact: Fact) -> str | None:
        missing = [text for text in self.texts if text not in fact.get("texts", ())]
        return f"does not say {'; '.join(missing)}" if missing else None


@dataclass(frozen=True)
class Row:
    """A seam: purpose, end, expectations, and the releases to judge."""

    seam: str
    purpose: str
    exit: str
    """The change upstream, or here, after which the row goes; empty: a public interface."""
    expects: tuple[Expectation, ...]
    releases: tuple[str, ...]
    """Releases judged by the row; another row may cover the others."""

    def broken(self, facts: Mapping[str, Fact | None]) -> list[str]:
        """Reasons why a release with these facts breaks the row; empty: the row holds.

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
