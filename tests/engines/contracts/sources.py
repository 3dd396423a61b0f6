"""Resolves names of a Python project inside a wheel, without importing or unpacking."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Found:
    """A module, or a class, function or value of `module`; each overload is a node."""

    kind: str  # module, class, function or value
    module: str
    nodes: tuple[ast.AST, ...] = ()

    @property
    def node(self) -> ast.AST:
        return self.nodes[0]


class Sources:
    """The Python files and stubs of a wheel."""

    def __init__(self, wheel: Path) -> None:
        """Opens the wheel; raises zipfile.BadZipFile for another file."""
        self._zip = zipfile.ZipFile(wheel)
        self.files = frozenset(self._zip.namelist())
        self.tree = cache(self._tree)
        self.find = cache(self._find)

    def close(self) -> None:
        self._zip.close()

    def read(self, file: str) -> str:
        return self._zip.read(file).decode()

    def _tree(self, module: str) -> ast.Module | None:
        """Returns the parsed source of a module, or the stub of a compiled module."""
        path = module.replace(".", "/")
        for file in (f"{path}.py", f"{path}/__init__.py", f"{path}.pyi", f"{path}/__init__.pyi"):
            if file in self.files:
                return ast.parse(self.read(file))
        return None

    def _find(self, name: str) -> Found | None:
        """Returns the definition of a qualified name; None = there is none."""
        parts = name.split(".")
        for count in range(len(parts), 0, -1):
            module = ".".join(parts[:count])
            if self.tree(module) is not None:
                return self._below(Found("module", module), parts[count:])
        return None

    def _below(self, found: Found | None, parts: list[str]) -> Found | None:
        for part in parts:
            if found is None:
                return None
            if found.kind == "module":
                found = self._in_module(found.module, part, frozenset())
            else:
                owner = self.class_of(found)
                found = None if owner is None else self.member(owner, part)
        return found

    def _in_module(self, module: str, name: str, seen: frozenset[tuple[str, str]]) -> Found | None:
        """Returns the definition of a name in a module.

        seen: lookups in progress, because modules may import each other.
        """
        tree = self.tree(module)
        if tree is None or (module, name) in seen:
            return None
        seen |= {(module, name)}
        defined = [node for node in _statements(tree.body) if _defines(node, name)]
        if defined:
            return self._found(module, defined)
        for node in _statements(tree.body):
            found = None
            if isinstance(node, ast.ImportFrom):
                origin = self._origin(module, node)
                for alias in node.names:
                    if alias.name == "*":
                        found = self._in_module(origin, name, seen)
                    elif (alias.asname or alias.name) == name:
                        found = self._in_module(origin, alias.name, seen)
                        if found is None and self.tree(f"{origin}.{alias.name}") is not None:
                            found = Found("module", f"{origin}.{alias.name}")
                    if found is not None:
                        return found
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.asname == name and self.tree(alias.name) is not None:
                        return Found("module", alias.name)
                    if alias.asname is None and alias.name.split(".")[0] == name:
                        return Found("module", name)
        if self.tree(f"{module}.{name}") is not None:
            return Found("module", f"{module}.{name}")
        return None

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        """Returns the qualified name of the module in a `from` import."""
        if not node.level:
            return node.module or ""
        path = module.replace(".", "/")
        is_package = any(f"{path}/__init__.{end}" in self.files for end in ("py", "pyi"))
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + is_package]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def _found(self, module: str, nodes: list[ast.AST]) -> Found | None:
        first = nodes[0]
        if isinstance(first, ast.ClassDef):
            return Found("class", module, (first,))
        if isinstance(first, Function):
            return Found("function", module, tuple(n for n in nodes if isinstance(n, Function)))
        # An alias of a class or function; of a conditional expression the first case.
        value = first.value if isinstance(first, ast.Assign) else None
        if isinstance(value, ast.IfExp):
            value = value.body
        target = self.named(module, value) if value is not None else None
        if target is not None and target.kind in ("class", "function"):
            return target
        return Found("value", module, (first,))

    def named(self, module: str, expression: ast.AST) -> Found | None:
        """Returns the meaning of a dotted name inside a module, without subscripts."""
        if isinstance(expression, ast.Subscript):
            expression = expression.value
        name = dotted(expression)
        if name is None:
            return None
        first, *rest = name.split(".")
        return self._below(self._in_module(module, first, frozenset()), rest)

    def class_of(self, found: Found) -> Found | None:
        """Returns the class of a value (by annotation or constructor call), or the class itself."""
        if found.kind == "class":
            return found
        if found.kind != "value":
            return None
        node, made = found.node, None
        if isinstance(node, ast.AnnAssign):
            made = node.annotation
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made = node.value.func
        owner = None if made is None else self.named(found.module, made)
        return owner if owner is not None and owner.kind == "class" else None

    def mro(self, owner: Found) -> list[Found]:
        """Returns a class and its bases inside the project, depth first."""
        assert isinstance(owner.node, ast.ClassDef)
        order = [owner]
        for base in owner.node.bases:
            found = self.named(owner.module, base)
            if found is not None and found.kind == "class":
                order += [each for each in self.mro(found) if each not in order]
        return order

    def member(self, owner: Found, name: str) -> Found | None:
        """Returns an attribute of a class: own, inherited, or set on self by a method."""
        for each in self.mro(owner):
            assert isinstance(each.node, ast.ClassDef)
            defined = [node for node in _statements(each.node.body) if _defines(node, name)]
            if defined:
                return self._found(each.module, defined)
            for node in ast.walk(each.node):
                if isinstance(node, ast.Assign | ast.AnnAssign) and any(
                    dotted(target) == f"self.{name}" for target in _targets(node)
                ):
                    return Found("value", each.module, (node,))
        return None

    def own_members(self, owner: Found) -> Iterator[tuple[str, ast.AST]]:
        """Yields the definitions in the body of a class, without bases."""
        assert isinstance(owner.node, ast.ClassDef)
        for node in _statements(owner.node.body):
            if isinstance(node, Function | ast.ClassDef):
                yield node.name, node
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for target in _targets(node):
                    if isinstance(target, ast.Name):
                        yield target.id, node


def dotted(node: ast.AST) -> str | None:
    """Returns `a.b.c` for a dotted name; None for other expressions."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])


def _statements(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yields the statements of a module or class, including those inside if, try and with."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for field in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [e for t in targets for e in (t.elts if isinstance(t, ast.Tuple | ast.List) else [t])]


def _defines(node: ast.AST, name: str) -> bool:
    if isinstance(node, Function | ast.ClassDef):
        return node.name == name
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return any(isinstance(t, ast.Name) and t.id == name for t in _targets(node))
    return False
