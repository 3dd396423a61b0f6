"""Start line and `r2serve doctor` of each machine of a field case, for `make cases MACHINES=1`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

START = "rails: "
"""Begin of the log line of a start about the rails of its node."""
DOCTOR = 'from r2serve.cli import main; main(["doctor"])'


class Machine(Protocol):
    """A node of a lab."""

    def run(self, *argv: str) -> str: ...


def lines_of(machines: Sequence[Machine], logs: Sequence[Sequence[str]], rails: str) -> list[str]:
    """Returns the start line of each machine's rank, and what `doctor` says there.

    rails: option `rails` of the ranks. logs: the log lines of each machine's rank.
    """
    return [
        f"node {number}: {line}"
        for number, (machine, log) in enumerate(zip(machines, logs, strict=True))
        for line in _of_machine(machine, log, rails)
    ]


def _of_machine(machine: Machine, log: Sequence[str], rails: str) -> Iterator[str]:
    yield "start: " + "; ".join(line for line in log if line.startswith(START))
    # doctor ends with status 1 if it has found a problem.
    command = ["env", f"R2CCL_RAILS={rails}", sys.executable, "-c", DOCTOR]
    said = machine.run("sh", "-c", '"$@" || true', "doctor", *command)
    yield from (f"doctor: {line}" for line in said.splitlines() if line.strip())


def show(
    say: Callable[[str], None] | None,
    machines: Sequence[Machine],
    logs: Callable[[], Sequence[Sequence[str]]],
    rails: str,
) -> None:
    """Prints the lines with `say`; None: the run does not print machines."""
    if say is not None:
        for line in lines_of(machines, logs(), rails):
            say(line)
