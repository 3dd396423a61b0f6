"""Runs the scripts of a folder that judge themselves, one after another; see `make cases`.

The last line of such a script is `ok NAME: …`, `FAIL NAME: got …, wanted …` or `SKIP NAME: …`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

LIMIT_S = 900.0
NUMBERED = "[0-9][0-9]-*.sh"
JUDGES = "judge.sh"
"""A script that judges itself reads this file."""
JUDGED = re.compile(r"(ok|FAIL|SKIP) \S+: ")


def judge(script: Path, limit_s: float = LIMIT_S) -> str:
    """Runs a script; returns its last line, or a line of the same form with the reason."""
    if JUDGES not in script.read_text(encoding="utf-8"):
        return f"SKIP {script.stem}: the script does not judge itself; a marked test does"
    try:
        done = subprocess.run(
            ["bash", str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"FAIL {script.stem}: got no end within {limit_s:g} s, wanted one"
    last = (done.stdout.splitlines() or [""])[-1]
    if JUDGED.match(last):
        return last
    return f"FAIL {script.stem}: got status {done.returncode} and {last!r}, wanted a judgement"


def main(folder: Path) -> int:
    """Prints a line for each script; returns 1 if one fails, or if the folder has none."""
    scripts = sorted(folder.glob(NUMBERED))
    if not scripts:
        sys.stderr.write(f"{folder} has no script {NUMBERED}\n")
        return 1
    failed = 0
    for script in scripts:
        line = judge(script)
        failed += line.startswith("FAIL")
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
