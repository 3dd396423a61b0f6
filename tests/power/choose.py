"""Draws a list of source mutations from a seed.

choose.py cpp|python SEED COUNT

Prints the list as JSON. The same sources and seed give the same list. `make coverage` must run
first: the tests of an entry are the tests that run its line. A line without a test is drawn, too;
its mutation survives.
"""

from __future__ import annotations

import ast
import json
import random
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

from covering import Covering
from mutation import ROOT, Mutation, MutationError, line_number

# Parts of the core left out: the Python bindings, the simulator, and code run only in the guest.
CPP_LEFT_OUT = ("csrc/bindings/", "csrc/sim/", "csrc/drivers/ibverbs")
# Parts of the package left out: the lab, the demo and the simulator, because these are tests.
PYTHON_LEFT_OUT = ("r2serve/lab/", "r2serve/demo/", "r2serve/sim/")

CPP_CONDITION = re.compile(r"(?:\} else )?(?:if|while) \((?P<of>.+)\)(?: \{|\s+\S.*;)?")
CPP_RETURN = re.compile(r"return (?P<of>.+);")
CPP_STATEMENT = re.compile(r"(?:\+\+|--)?[a-z_][\w.\->\[\]]*(?:(?: [-+|&]?= | << |\().*|\+\+|--)?;")
CPP_OPERATORS = (
    (" < ", " <= "),
    (" <= ", " < "),
    (" > ", " >= "),
    (" >= ", " > "),
    (" == ", " != "),
    (" != ", " == "),
    (" && ", " || "),
    (" || ", " && "),
    (" + ", " - "),
    (" - ", " + "),
)
TOLD_TO_PEOPLE = re.compile(
    r"log|warn|assert|throw|message|what|raise|text|describe", re.IGNORECASE
)

PYTHON_COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: (" is ", " is not "),
    ast.IsNot: (" is not ", " is "),
    ast.In: (" in ", " not in "),
    ast.NotIn: (" not in ", " in "),
}


def cpp_candidates(file: str, lines: Sequence[str]) -> Iterator[Mutation]:
    """Yields the mutations of C++ lines: changed operators, negations, removed statements."""
    for index, whole in enumerate(lines):
        line = whole.strip()
        if TOLD_TO_PEOPLE.search(line) or '"' in line or "constexpr" in line:
            continue
        nth = sum(other.strip() == line for other in lines[:index])
        found = CPP_CONDITION.fullmatch(line) or CPP_RETURN.fullmatch(line)
        if found is not None:
            expression = _balanced(found["of"])
            if expression is None or re.search(r"[^=!<>]=[^=]|[{};]", expression):
                continue
            forms = [
                expression.replace(old, new, 1)
                for old, new in CPP_OPERATORS
                if expression.count(old) == 1
            ]
            if not line.startswith("return"):
                forms.append(f"!({expression})")
            kind = "bool" if not line.startswith("return") else ""
            for form in forms:
                yield Mutation(0, file, line, nth, expression, _as(kind, form), "expression")
        elif CPP_STATEMENT.fullmatch(line) and lines[index - 1].rstrip().endswith((";", "{", "}")):
            yield Mutation(0, file, line, nth, line, "", "statement")


def _as(kind: str, expression: str) -> str:
    return f"{kind}({expression})" if kind else expression


def _balanced(text: str) -> str | None:
    """Returns the text before the closing parenthesis; None = closed on another line."""
    depth = 0
    for position, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth < 0:
            return text[:position]
    return text if depth == 0 else None


def python_candidates(file: str, source: str) -> Iterator[Mutation]:
    """Yields the mutations of Python: comparisons, logic, numbers, conditions, removed calls."""
    lines = source.split("\n")
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.expr | ast.stmt) or node.lineno != node.end_lineno:
            continue
        original = ast.get_source_segment(source, node) or ""
        line = lines[node.lineno - 1].strip()
        if TOLD_TO_PEOPLE.search(line) or line.startswith("@") or line.count(original) != 1:
            continue
        nth = sum(other.strip() == line for other in lines[: node.lineno - 1])
        for mutated in _python_forms(node, original):
            form = "statement" if mutated is None else "expression"
            yield Mutation(0, file, line, nth, original, mutated or "", form)


def _python_forms(node: ast.AST, original: str) -> Iterator[str | None]:
    """Yields replacements for the text of a node; None = the statement is removed."""
    match node:
        case ast.Compare(ops=[operator]):
            old, new = PYTHON_COMPARISONS[type(operator)]
            if original.count(old) == 1:
                yield original.replace(old, new)
        case ast.BoolOp(op=operator, values=[_, _]):
            words = (" and ", " or ") if isinstance(operator, ast.And) else (" or ", " and ")
            if original.count(words[0]) == 1:
                yield original.replace(*words)
        case ast.UnaryOp(op=ast.Not()):
            yield original.removeprefix("not ")
        case ast.BinOp(op=ast.Add() | ast.Sub(), right=ast.Constant(value=int())):
            signs = (" + ", " - ") if isinstance(node.op, ast.Add) else (" - ", " + ")
            if original.count(signs[0]) == 1:
                yield original.replace(*signs)
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Constant(value=int(value)):
            yield str(value + 1)
        case ast.Expr(value=ast.Call()):
            yield None


def candidates(language: str) -> list[Mutation]:
    folder, suffix, left_out = {
        "cpp": ("csrc", ".cc", CPP_LEFT_OUT),
        "python": ("r2serve", ".py", PYTHON_LEFT_OUT),
    }[language]
    found: list[Mutation] = []
    for path in sorted((ROOT / folder).rglob(f"*{suffix}")):
        file = path.relative_to(ROOT).as_posix()
        if file.startswith(left_out):
            continue
        source = path.read_text(encoding="utf-8")
        if language == "cpp":
            found += cpp_candidates(file, source.split("\n"))
        else:
            found += python_candidates(file, source)
    return found


def choose(language: str, seed: int, count: int, covering: Covering) -> list[Mutation]:
    """Draws `count` mutations, at most one from each line."""
    chosen: list[Mutation] = []
    lines: set[tuple[str, int]] = set()
    everything = candidates(language)
    for each in random.Random(seed).sample(everything, len(everything)):
        source = (ROOT / each.file).read_text(encoding="utf-8").split("\n")
        try:
            line = line_number(each, source)
        except MutationError:  # the line contains the original twice
            continue
        if (each.file, line) in lines:
            continue
        lines.add((each.file, line))
        tests = covering.tests_of(each.file, line + 1)
        chosen.append(replace(each, number=len(chosen) + 1, tests=tests))
        if len(chosen) == count:
            break
    return chosen


def main(arguments: Sequence[str]) -> int:
    match list(arguments):
        case [("cpp" | "python") as language, seed, count]:
            covering = Covering(ROOT / "build/coverage", language)
            drawn = choose(language, int(seed), int(count), covering)
            sys.stdout.write(json.dumps([asdict(each) for each in drawn], indent=1) + "\n")
            return 0
    sys.stderr.write(f"{__doc__}")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
