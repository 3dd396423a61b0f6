"""Extracts facts for the rows from the sources of a release.

Fields of a fact; a field is present if an expectation needs the field:

``is``          module, class, function, value or file; always present.
``value``       source text of a constant's value, up to 80 characters.
``parameters``  of a function, a text per overload: names and defaults, without types.
``order``       marks in a function's body, by first mention.
``has``         attributes of a class, out of the names in the rows.
``abstract``    abstract methods of a class, sorted.
``methods``     all methods of a class, inherited ones included, sorted.
``special``     special methods of a class (``__call__``), without constructors.
``texts``       texts in a file, out of the texts in the rows.

The fact of a missing subject is `null`.
"""

from __future__ import annotations

import ast
import fnmatch
import re
from collections.abc import Iterable, Iterator
from typing import Any

from contracts.sources import Found, Function, Sources, dotted

from r2serve.seams import Row

LONGEST_VALUE = 80


def extract(sources: Sources, rows: Iterable[Row]) -> dict[str, Any]:
    """Returns the facts about every subject of `rows`, by subject."""
    asked: dict[str, dict[str, set[str]]] = {}
    for row in rows:
        for expectation in row.expects:
            fields = asked.setdefault(expectation.subject, {})
            for field, names in expectation.asks().items():
                fields.setdefault(field, set()).update(names)
    return {subject: _fact(sources, subject, asked[subject]) for subject in sorted(asked)}


def _fact(sources: Sources, subject: str, asked: dict[str, set[str]]) -> dict[str, Any] | None:
    if subject.startswith("file:"):
        return _of_files(sources, subject.removeprefix("file:"), asked.get("texts", set()))
    found = sources.find(subject)
    if found is None:
        return None
    fact: dict[str, Any] = {"is": found.kind}
    if found.kind == "function":
        fact["parameters"] = _parameters(found)
        if "order" in asked:
            fact["order"] = _mentions(found, asked["order"])
    elif found.kind == "value":
        text = _value(found.node)
        if text is not None and len(text) <= LONGEST_VALUE:
            fact["value"] = text
    owner = sources.class_of(found)
    if owner is not None:
        fact |= _of_class(sources, owner, asked)
    return fact


def _of_class(sources: Sources, owner: Found, asked: dict[str, set[str]]) -> dict[str, Any]:
    fact: dict[str, Any] = {}
    if "has" in asked:
        fact["has"] = sorted(n for n in asked["has"] if sources.member(owner, n) is not None)
    first: dict[str, ast.AST] = {}
    for each in sources.mro(owner):
        for name, node in sources.own_members(each):
            first.setdefault(name, node)
    if "abstract" in asked:
        fact["abstract"] = sorted(name for name, node in first.items() if _is_abstract(node))
    if "methods" in asked:
        fact["methods"] = sorted(name for name, node in first.items() if isinstance(node, Function))
    if "special" in asked:
        fact["special"] = sorted(name for name, node in first.items() if _is_special(name, node))
    return fact


def _of_files(sources: Sources, pattern: str, texts: set[str]) -> dict[str, Any] | None:
    files = fnmatch.filter(sorted(sources.files), pattern)
    if not files:
        return None
    whole = "".join(_bare(sources.read(file)) for file in files)
    return {"is": "file", "texts": sorted(text for text in texts if _bare(text) in whole)}


def _bare(text: str) -> str:
    """Returns C code without comments and blanks."""
    without = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
    return re.sub(r"\s+", "", without)


def _parameters(found: Found) -> list[str]:
    texts = []
    for node in found.nodes:
        assert isinstance(node, Function)
        # Works on a copy without types: a caller must get names and defaults right.
        given = ast.parse(f"def f({ast.unparse(node.args)}): ...").body[0]
        assert isinstance(given, ast.FunctionDef)
        for each in ast.walk(given.args):
            if isinstance(each, ast.arg):
                each.annotation = None
        text = ast.unparse(given.args)
        if text not in texts:
            texts.append(text)
    return texts


def _mentions(found: Found, marks: set[str]) -> list[str]:
    order: list[str] = []
    for node in found.nodes:
        assert isinstance(node, Function)
        for statement in node.body:
            for mark in _marks(statement):
                if mark in marks and mark not in order:
                    order.append(mark)
    return order


def _marks(node: ast.AST) -> Iterator[str]:
    """Yields dotted names, keywords and strings below `node`, in source order."""
    name = dotted(node)
    if name is not None:
        yield name
        return
    if isinstance(node, ast.Assign):  # in the order of evaluation
        for child in (node.value, *node.targets):
            yield from _marks(child)
        return
    if isinstance(node, ast.keyword) and node.arg is not None:
        yield f"{node.arg}="
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield repr(node.value)
    for child in ast.iter_child_nodes(node):
        yield from _marks(child)
    if isinstance(node, ast.Attribute):  # attribute of a call's result
        yield f".{node.attr}"


def _value(node: ast.AST) -> str | None:
    value = getattr(node, "value", None)
    return None if value is None else ast.unparse(value)


def _is_abstract(node: ast.AST) -> bool:
    return isinstance(node, Function) and any(
        (dotted(each) or "").split(".")[-1] in ("abstractmethod", "abstractproperty")
        for each in node.decorator_list
    )


def _is_special(name: str, node: ast.AST) -> bool:
    is_special = name.startswith("__") and name.endswith("__")
    made_with = ("__init__", "__new__", "__post_init__", "__init_subclass__")
    return isinstance(node, Function) and is_special and name not in made_with
