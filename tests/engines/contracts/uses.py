"""Finds names of other projects in our sources, by syntax, without an import.

Attributes of untyped values (`vllm_config.parallel_config`) are not found here; the rows list these
by hand.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from contracts.sources import dotted

from r2serve.seams import Has, Row


def used(source: Path, prefixes: tuple[str, ...]) -> set[str]:
    """Returns the qualified names below `prefixes`, imported or read by a file."""
    tree = ast.parse(source.read_text())
    names = dict(_imported(tree))
    found = {name for name in names.values() if _is_below(name, prefixes)}
    for node in _outermost(tree):
        first, *rest = (dotted(node) or "").split(".")
        name = ".".join([names.get(first, ""), *rest])
        if _is_below(name, prefixes):
            found.add(name)
    return found


def covered(name: str, rows: Sequence[Row]) -> bool:
    """Returns whether a row is about `name`, or about a part of the module `name`.

    Methods of a dictionary need no row besides the dictionary's row; every module has a file.
    """
    owner, _, last = name.rpartition(".")
    if last == "__file__":
        return True
    if hasattr(dict, last):
        return covered(owner, rows)
    for row in rows:
        for expectation in row.expects:
            subject = expectation.subject
            if subject == name or subject.startswith(f"{name}."):
                return True
            if subject == owner and isinstance(expectation, Has) and last in expectation.names:
                return True
    return False


def methods(source: Path) -> dict[str, set[str]]:
    """Returns the names of the methods of each class of a file, nested classes included."""
    tree = ast.parse(source.read_text())
    return {
        node.name: {
            each.name
            for each in node.body
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }


def bases(source: Path) -> dict[str, list[str]]:
    """Returns the qualified names of each class's bases, as far as imports show."""
    tree = ast.parse(source.read_text())
    names = dict(_imported(tree))
    found: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            listed = [(dotted(base) or "").split(".") for base in node.bases]
            found[node.name] = [".".join([names.get(b[0], b[0]), *b[1:]]) for b in listed]
    return found


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yields local names of a file with their meaning, imports inside functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname is not None:
                    yield alias.asname, alias.name
                else:
                    first = alias.name.split(".")[0]
                    yield first, first


def _outermost(node: ast.AST) -> Iterator[ast.AST]:
    """Yields dotted names of full length."""
    if isinstance(node, ast.Attribute | ast.Name) and dotted(node) is not None:
        yield node
        return
    for child in ast.iter_child_nodes(node):
        yield from _outermost(child)


def _is_below(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name.startswith(f"{prefix}.") for prefix in prefixes)
