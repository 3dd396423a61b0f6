"""Source mutations: small bugs inserted into the project's sources, to be caught by the tests.

The lists are `cpp.json` and `python.json` in this folder. choose.py draws a list from a seed.
try_mutations.py runs the tests against each entry.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
CHOSEN_BY = "R2SERVE_MUTATION"
"""Environment variable with the number of the active mutation in a mutated C++ build."""

CPP_HEADER = f"""\
#pragma once
#include <cstdlib>

namespace r2ccl {{
// Returns whether the mutation with this number is active in this process.
inline bool mutated(int number) {{
  static const char* const text = std::getenv("{CHOSEN_BY}");
  static const int chosen = text == nullptr ? 0 : std::atoi(text);
  return chosen == number;
}}
}}  // namespace r2ccl
"""


class MutationError(ValueError):
    """A list entry that does not fit the sources; the text names the entry."""


@dataclass(frozen=True)
class Mutation:
    """A single bug.

    number: from 1, unique in the list. file: path relative to the project's root. line: the source
    line without indentation; contains `original`. nth: index among the lines with equal text, from
    0. original: the text replaced by `mutated`. form: `expression`, or `statement` for a removed
    statement. tests: names of native programs, or pytest node ids; these run the line, and the
    fastest come first. equal: for an equivalent mutation, the reason why no test can catch it.
    """

    number: int
    file: str
    line: str
    nth: int
    original: str
    mutated: str
    form: str
    tests: tuple[str, ...] = ()
    equal: str = ""

    @property
    def text(self) -> str:
        new = "nothing" if self.form == "statement" else f"`{self.mutated}`"
        return f"{self.number}: {self.file}: `{self.original}` becomes {new}"


def load(path: Path) -> list[Mutation]:
    return [
        Mutation(**{**entry, "tests": tuple(entry["tests"])})
        for entry in json.loads(path.read_text(encoding="utf-8"))
    ]


def save(path: Path, mutations: Sequence[Mutation]) -> None:
    entries = [asdict(each) for each in mutations]
    path.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


def line_number(mutation: Mutation, lines: Sequence[str]) -> int:
    """Returns the index of the mutation's line.

    Raises:
        MutationError: the line is missing, or contains `original` not exactly once.
    """
    found = [index for index, line in enumerate(lines) if line.strip() == mutation.line]
    if len(found) <= mutation.nth or mutation.line.count(mutation.original) != 1:
        raise MutationError(
            f"mutation {mutation.text}: the source has no such line; choose another mutation "
            "(tests/power/choose.py)"
        )
    return found[mutation.nth]


def in_python(mutation: Mutation, source: str) -> str:
    """Returns the source with this bug."""
    lines = source.split("\n")
    index = line_number(mutation, lines)
    new = "pass" if mutation.form == "statement" else mutation.mutated
    lines[index] = lines[index].replace(mutation.original, new)
    return "\n".join(lines)


def in_cpp(mutations: Sequence[Mutation], source: str) -> str:
    """Returns the source with all bugs; a bug is active only if its number is chosen."""
    lines = source.split("\n")
    places = [line_number(each, lines) for each in mutations]
    if len(set(places)) < len(places):
        raise MutationError(f"two mutations of one line: {[each.text for each in mutations]}")
    for mutation, index in zip(mutations, places, strict=True):
        chosen = f"::r2ccl::mutated({mutation.number})"
        if mutation.form == "statement":
            new = f"if (!{chosen}) {mutation.original}"
        else:
            new = f"({chosen} ? ({mutation.mutated}) : ({mutation.original}))"
        lines[index] = lines[index].replace(mutation.original, new)
    return "\n".join(lines)
