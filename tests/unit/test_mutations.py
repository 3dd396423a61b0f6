"""The lists of source mutations fit the sources, and produce the named bugs."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest
from choose import cpp_candidates, python_candidates
from mutation import FOLDER, ROOT, Mutation, MutationError, in_cpp, in_python, load

LANGUAGES = [path.stem for path in sorted(FOLDER.glob("*.json"))]
COUNTS = {"cpp": 45, "python": 21}
"""Mutations of each list, as docs/testing.md has them."""

CPP = """\
bool late(int now, int sent) {
  count += 1;
  if (now < sent) return false;
  return now - sent > limit;
}
"""
PYTHON = """\
def late(now: int, sent: int) -> bool:
    note(now)
    if not now:
        return False
    return now - 1 > sent
"""


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_mutation_fits_a_source(language: str) -> None:
    mutations = load(FOLDER / f"{language}.json")
    assert [each.number for each in mutations] == list(range(1, COUNTS[language] + 1))
    for file in {each.file for each in mutations}:
        here = [each for each in mutations if each.file == file]
        source = (ROOT / file).read_text(encoding="utf-8")
        if language == "cpp":
            assert in_cpp(here, source).count("::r2ccl::mutated(") == len(here)
        for each in here if language == "python" else []:
            assert ast.dump(ast.parse(in_python(each, source))) != ast.dump(ast.parse(source))


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_mutation_names_tests_that_exist(language: str) -> None:
    tests = {test for each in load(FOLDER / f"{language}.json") for test in each.tests}
    for test in tests:
        if language == "cpp":
            assert (ROOT / f"tests/native/{test}.cc").exists(), test
        else:
            file, _, name = test.partition("::")
            function = f"def {name.rpartition('::')[2]}(" if name else "def test_"
            assert function in (ROOT / file).read_text(encoding="utf-8"), test


def test_cpp_lines_give_their_possible_mutations() -> None:
    found = {(each.original, each.mutated) for each in cpp_candidates("a.cc", CPP.split("\n"))}
    assert found == {
        ("count += 1;", ""),
        ("now < sent", "bool(now <= sent)"),
        ("now < sent", "bool(!(now < sent))"),
        ("now - sent > limit", "now - sent >= limit"),
        ("now - sent > limit", "now + sent > limit"),
    }


def test_python_lines_give_their_possible_mutations() -> None:
    found = {(each.original, each.mutated) for each in python_candidates("a.py", PYTHON)}
    assert found == {
        ("note(now)", ""),
        ("not now", "now"),
        ("False", "True"),
        ("1", "2"),
        ("now - 1", "now + 1"),
        ("now - 1 > sent", "now - 1 >= sent"),
    }


def test_a_cpp_mutation_is_active_only_if_chosen() -> None:
    expression, statement = (
        Mutation(
            7, "a.cc", "if (now < sent) return false;", 0, "now < sent", "now <= sent", "expression"
        ),
        Mutation(8, "a.cc", "count += 1;", 0, "count += 1;", "", "statement"),
    )
    lines = in_cpp([expression, statement], CPP).split("\n")
    assert lines[1] == "  if (!::r2ccl::mutated(8)) count += 1;"
    assert lines[2] == "  if ((::r2ccl::mutated(7) ? (now <= sent) : (now < sent))) return false;"


def test_a_python_mutation_is_written_into_the_source() -> None:
    statement = Mutation(1, "a.py", "note(now)", 0, "note(now)", "", "statement")
    assert in_python(statement, PYTHON).split("\n")[1] == "    pass"


def test_a_mutation_of_a_missing_line_is_refused() -> None:
    mutation = Mutation(3, "a.py", "note(now)", 0, "note(now)", "", "statement")
    for wrong in (replace(mutation, line="note(then)"), replace(mutation, nth=1)):
        with pytest.raises(MutationError, match=r"mutation 3: a\.py: .*no such line"):
            in_python(wrong, PYTHON)
    with pytest.raises(MutationError, match="two mutations of one line"):
        in_cpp([mutation, mutation], PYTHON)
