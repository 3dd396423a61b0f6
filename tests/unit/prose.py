"""Counts of plain language in comments, docstrings and pages, with their marks.

Comments are counted a folder. A folder with fewer than `FEWEST_WORDS` words is counted with its
parent. A page is counted if it has at least `FEWEST_SENTENCES` sentences; code, tables, headings
and images are left out. ``test_tidy.py`` holds every folder and page to the marks.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

COMMENT_PROFORMS = 4.0  # per 100 words
PAGE_PROFORMS = 4.5  # per 100 words
LEADING_PERCENT = 2.0
MEAN_WORDS = 16.0  # of a sentence
LONGEST_WORDS = 40
FEWEST_WORDS = 400
FEWEST_SENTENCES = 8
SHORTEST = 3  # words; shorter comments and sentences are not counted

PROFORM = re.compile(
    r"\b(?:who|whoever|what|whatever|which|that|those|it|its|one|nobody|somebody|they|them|such)\b",
    re.IGNORECASE,
)
LEADING = re.compile(r"\s*(?:Of|By|For|To|At|As)\s+[a-z]")
WORD = re.compile(r"[A-Za-z']+")
# A person may be "who"; a process, rank, peer or rail may not.
BANNED = re.compile(
    r"\b(?:he|him|his|she|her|whoever|nobody|somebody|anew|for ever|so many|so often|in vain"
    r"|buried|exhumed?|farewell)\b",
    re.IGNORECASE,
)
PERSON_WHO = re.compile(
    r"\b(?:users?|people|engineers?|operators?|readers?|person|anyone|teams?|SREs?)\s+who\b",
    re.IGNORECASE,
)
WHO = re.compile(r"\bwho\b", re.IGNORECASE)
SOURCES = {".cc", ".hpp", ".cu", ".py"}
TOP_FOLDERS = ("csrc", "r2serve", "kernels", "bench", "tests")


@dataclass(frozen=True)
class Comment:
    path: Path
    text: str


def comments_of(path: Path, text: str) -> list[str]:
    """The comments and docstrings of a source file."""
    found = python_comments(text) if path.suffix == ".py" else cpp_comments(text)
    return [each for each in found if len(each.split()) >= SHORTEST]


def cpp_comments(text: str) -> Iterator[str]:
    """``//`` comments; consecutive lines are a single comment."""
    for block in re.findall(r"(?:^[ \t]*//[^\n]*\n)+|//[^\n]*", text, flags=re.MULTILINE):
        lines = [re.sub(r"^\s*//+[/!<]*", "", line) for line in block.split("\n")]
        yield " ".join(lines).strip()


def python_comments(text: str) -> Iterator[str]:
    """Docstrings, then ``#`` comments, each line by itself."""
    for node in ast.walk(ast.parse(text)):
        literal = node.value if isinstance(node, ast.Expr) else None
        if isinstance(literal, ast.Constant) and isinstance(literal.value, str):
            yield literal.value.strip()
    yield from (comment.strip() for comment in re.findall(r"#\s(.*)", text))


def words_of(text: str) -> list[str]:
    return WORD.findall(text)


def proforms_per_100(text: str) -> float:
    return 100 * len(PROFORM.findall(text)) / max(1, len(words_of(text)))


def leading_percent(comments: Iterable[str]) -> float:
    """The share of comments with a leading preposition, in percent."""
    each = list(comments)
    return 100 * sum(LEADING.match(comment) is not None for comment in each) / max(1, len(each))


def by_folder(sources: Mapping[Path, str]) -> dict[Path, list[Comment]]:
    """The comments of each folder, small folders merged into their parents."""
    groups: defaultdict[Path, list[Comment]] = defaultdict(list)
    for path, text in sources.items():
        if path.parts[0] in TOP_FOLDERS and path.suffix in SOURCES:
            groups[path.parent] += [Comment(path, each) for each in comments_of(path, text)]
    for folder in sorted(groups, key=lambda each: -len(each.parts)):
        small = sum(len(words_of(each.text)) for each in groups[folder]) < FEWEST_WORDS
        if small and len(folder.parts) > 1:
            groups[folder.parent] += groups.pop(folder)
    return dict(groups)


def prose_of(page: str) -> str:
    """The text of a page without code, tables, headings and images."""
    text = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    left_out = ("|", "#", "![", "<")
    kept = [line for line in text.split("\n") if not line.lstrip().startswith(left_out)]
    text = re.sub(r"`[^`]*`", "X", "\n".join(kept))
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


def sentences_of(prose: str) -> list[str]:
    """The sentences of a page's prose; list items and paragraphs end a sentence, too."""
    return [
        sentence
        for paragraph in re.split(r"\n\s*\n|\n[-*] |\n\d+\. ", prose)
        for sentence in re.split(r"(?<=[.!?:;])\s+(?=[A-Z(])", paragraph.replace("\n", " "))
        if len(sentence.split()) >= SHORTEST
    ]


def banned_words(text: str) -> list[str]:
    """The words of a text that a machine is not described with."""
    found = BANNED.findall(text)
    return found + WHO.findall(PERSON_WHO.sub("", text))
