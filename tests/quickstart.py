"""The commands of docs/quickstart.md, with the nodes that the page gives them to."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "quickstart.md"
_BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_BOLD = re.compile(r"\*\*(both|node \d|all)\*\*")
BOTH = (0, 1)


@dataclass(frozen=True)
class Command:
    """A command of the page; nodes: the nodes that run it."""

    text: str
    nodes: tuple[int, ...]

    @property
    def words(self) -> list[str]:
        """The words of the command, without a redirection."""
        words = shlex.split(self.text)
        return words[: words.index(">")] if ">" in words else words


def commands() -> list[Command]:
    """Returns all commands of the page, in the order of the page.

    The last bold word before a block names its nodes: **both**, **all**, **node 0** or **node 1**.
    """
    text = PAGE.read_text(encoding="utf-8")
    found: list[Command] = []
    for block in _BLOCK.finditer(text):
        where = _BOLD.findall(text[: block.start()])[-1]
        nodes = BOTH if where in ("both", "all") else (int(where.removeprefix("node ")),)
        found += [Command(line, nodes) for line in block[1].splitlines()]
    return found


def environment(commands: list[Command]) -> dict[str, str]:
    """Returns the variables that the page exports."""
    exported = (each.words[1] for each in commands if each.words[0] == "export")
    return dict(one.split("=", 1) for one in exported)
