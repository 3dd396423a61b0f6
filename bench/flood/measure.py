"""Slices of collectives under a flood, in turns at r2ccl's ports and at a port that is not r2ccl's.

The second half is the control: the flooder itself and the kernel's handshakes take CPU time, too.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from r2serve.bench.flood.worker import KINDS

P50_LIMIT, P99_LIMIT = 1.10, 2.0
LINES_IN_10_S = 1
WHERE = ("rails", "elsewhere")

Slice = dict[str, float]


class FloodError(Exception):
    """A process of the measurement has ended; the text has its last words."""


class Helper:
    """A process of the measurement, with lines of JSON both ways."""

    def __init__(self, *words: str) -> None:
        self.words = words
        command = [sys.executable, "-m", "r2serve.bench.flood.worker", *words]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        """Returns the next answer.

        Raises:
            FloodError: the process has ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise FloodError(f"the process {' '.join(self.words)} ended with status {status}")
        return json.loads(line)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True)
class Pair:
    """One slice at each place, of one kind of flood."""

    kind: str
    rails: Slice
    elsewhere: Slice

    def ratio(self, name: str) -> float:
        return self.rails[name] / self.elsewhere[name]


class Setting:
    """Two ranks with two rails each, a flooder and a foreign listener, on loopback."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        def start(*words: str) -> Helper:
            helper = Helper(*words)
            stack.callback(helper.end)
            return helper

        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        self._ranks = [start("rank", str(number), port) for number in range(2)]
        self._flooder = start("flooder")
        self.at = {"elsewhere": [start("elsewhere").hear()]}
        remote = {each for rank in self._ranks for each in rank.hear()}
        self.at["rails"] = [list(_address(each)) for each in sorted(remote)]

    def slice(self, kind: str, where: str, seconds: float) -> Slice:
        """Returns what rank 0 measured, the lines of the rank with most, and the connections."""
        self._flooder.ask({"addresses": self.at[where], "kind": kind, "seconds": seconds})
        for rank in self._ranks:
            rank.ask({"seconds": seconds})
        measured = [rank.hear() for rank in self._ranks]
        lines = {"lines": max(each["lines"] for each in measured)}
        found: Slice = {**measured[0], **lines, **self._flooder.hear()}
        return found


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def turns(slices: int) -> Iterator[Sequence[str]]:
    """Returns the order of the places in each pair: the first place changes."""
    for number in range(slices):
        yield WHERE if number % 2 == 0 else WHERE[::-1]


def run(progress: Callable[[str], None], slices: int, seconds: float) -> list[Pair]:
    """Measures ``slices`` pairs of each kind of flood, of ``seconds`` each.

    Raises:
        FloodError: a process has ended.
    """
    pairs = []
    with contextlib.ExitStack() as stack:
        setting = Setting(stack)
        for kind in KINDS:
            for number, order in enumerate(turns(slices), 1):
                found = {where: setting.slice(kind, where, seconds) for where in order}
                pairs.append(Pair(kind, found["rails"], found["elsewhere"]))
                progress(f"{kind}: pair {number} of {slices}, p50 {pairs[-1].ratio('p50_us'):.2f}x")
    return pairs


def summary(pairs: Sequence[Pair], seconds: float) -> list[dict[str, Any]]:
    """Returns the medians of each kind, and whether they are within the limits."""
    rows = []
    for kind in dict.fromkeys(pair.kind for pair in pairs):
        own = [pair for pair in pairs if pair.kind == kind]
        row: dict[str, Any] = {"kind": kind, "pairs": len(own)}
        for name in ("p50_us", "p99_us", "max_us", "connections"):
            for where in WHERE:
                row[f"{name} {where}"] = median(getattr(pair, where)[name] for pair in own)
        row["p50"] = median(pair.ratio("p50_us") for pair in own)
        row["p99"] = median(pair.ratio("p99_us") for pair in own)
        row["lines in 10 s"] = median(pair.rails["lines"] for pair in own) * 10 / seconds
        row["met"] = (
            row["p50"] <= P50_LIMIT
            and row["p99"] <= P99_LIMIT
            and row["lines in 10 s"] <= LINES_IN_10_S
        )
        rows.append(row)
    return rows


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table(title="All-reduce of 16 KiB under a flood: at rails, against elsewhere")
    for column in ("flood", "connections", "p50 us", "p99 us", "p50", "p99", "log lines in 10 s"):
        table.add_column(column, justify="left" if column == "flood" else "right")
    for row in rows:
        both = {
            name: " / ".join(f"{row[f'{name} {where}']:.0f}" for where in WHERE)
            for name in ("connections", "p50_us", "p99_us")
        }
        table.add_row(
            row["kind"],
            both["connections"],
            both["p50_us"],
            both["p99_us"],
            f"{row['p50']:.2f}x",
            f"{row['p99']:.2f}x",
            f"{row['lines in 10 s']:.1f}",
        )
    console.print(table)
