"""Texts from outside the job: ids of requests, and answers of processes that r2serve does not know.

Logs, terminals, journals and the sidecar receive such a text only through this module. A client
can then neither begin a line of a log nor send a control sequence to a terminal.
"""

from __future__ import annotations

import hashlib

LONGEST_NAME = 128
"""Most characters of a request's name."""
_DIGEST = 8


def request_name(identity: object) -> str:
    """Returns the name of a request: one printable word of at most LONGEST_NAME characters.

    Spaces and unprintable characters are escaped as in Python. A longer name ends in a tilde and
    in eight hexadecimal digits of its SHA-256, so long ids with one beginning remain different.
    A name is its own name.
    """
    text = str(identity)
    if len(text) <= LONGEST_NAME and text.isprintable() and " " not in text:
        return text
    word = printable(text).replace(" ", "\\x20")
    if len(word) <= LONGEST_NAME:
        return word
    digest = hashlib.sha256(word.encode()).hexdigest()[:_DIGEST]
    return f"{word[: LONGEST_NAME - _DIGEST - 1]}~{digest}"


def printable(text: str) -> str:
    """Returns the text with escapes in place of unprintable characters, such as line ends."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )
