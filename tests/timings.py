"""Keeps the duration of each part of `make test` in build/timings.json, and prints the table.

    timings.py run PART COMMAND ARGUMENT...    run a command, and keep its wall-clock time
    timings.py show SINCE                      print the parts run since SINCE (s since 1970)

A part that was up to date did not run, so the table leaves it out.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "build" / "timings.json"


def keep(part: str, seconds: float) -> None:
    """Saves the duration of a part."""
    row: dict[str, object] = {"seconds": round(seconds, 1), "ended": time.time()}
    row["load"] = os.getloadavg()[1]
    FILE.parent.mkdir(exist_ok=True)
    with FILE.with_suffix(".lock").open("w") as lock:  # two parts may end at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = read()
        kept.pop(part, None)
        kept[part] = row
        fresh = FILE.with_suffix(".new")
        fresh.write_text(json.dumps(kept, indent=1) + "\n")
        fresh.replace(FILE)


def read() -> dict[str, dict[str, object]]:
    return dict(json.loads(FILE.read_text())) if FILE.exists() else {}


def run(part: str, command: Sequence[str]) -> int:
    """Runs a command and returns its exit status; saves its duration even if the command fails."""
    began = time.monotonic()
    status = subprocess.run(command, check=False).returncode
    keep(part, time.monotonic() - began)
    return status


def table(since: float) -> list[str]:
    """Returns the table of the parts ended after `since` (s since 1970), in order of the ends."""
    rows = [(part, row) for part, row in read().items() if float(str(row["ended"])) >= since]
    lines = ["time by part (load: average of the last 5 minutes)"]
    for part, row in rows:
        lines.append(f"  {float(str(row['seconds'])):7.0f} s  load {row['load']:4.1f}  {part}")
    return [*lines, f"  {time.time() - since:7.0f} s  since the start"]


def main(arguments: Sequence[str]) -> int:
    match list(arguments):
        case ["run", part, *command] if command:
            return run(part, command)
        case ["show", since]:
            sys.stdout.write("\n".join(table(float(since))) + "\n")
            return 0
    sys.stderr.write(f"{__doc__}")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
