"""Files of results: a row per run, and a file with the arrival times of each run's tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from r2serve.lab.serving.client import Run

Row = dict[str, Any]


@dataclass(frozen=True)
class TokenTimes:
    """Send time and token arrival times of each request sent, in ms since the first request."""

    requests: tuple[tuple[float, tuple[float, ...]], ...]

    @classmethod
    def of(cls, run: Run) -> TokenTimes:
        """Returns the times of a run; time 0 is the first request."""
        sent = [request for request in run.requests if request.sent_ns]
        begun_ns = min((request.sent_ns for request in sent), default=0)

        def ms(time_ns: int) -> float:
            return round((time_ns - begun_ns) / 1e6, 3)

        return cls(tuple((ms(r.sent_ns), tuple(map(ms, r.times_ns))) for r in sent))


class Rows:
    """Rows of runs, optionally kept in a file with a line per row, written at once.

    Rows of the file with the same commit, key and label are not measured again. Other rows stay
    until newer rows of the same label, scenario and contender replace the old rows.

    label: name of the measurement, for a file with several measurements. folder: folder for token
    times; None: times are not kept. Raises ValueError when the file is not a file of rows.
    """

    def __init__(
        self,
        path: Path | None,
        metadata: Mapping[str, Any],
        *,
        label: str = "",
        folder: Path | None = None,
    ) -> None:
        self._path = path
        self._folder = folder
        self._common = {
            "label": label,
            "commit": metadata["commit"],
            "date": metadata["date"],
            "command": metadata["command"],
            "machine": metadata["machine"],
        }
        self._all = [] if path is None else read(path)

    def find(self, key: str, scenario: str, contender: str, pair: int) -> Row | None:
        """Returns the row of a measured run; None for a run not measured or with ``not_run``."""
        names = ("commit", "label", "key", "scenario", "contender", "pair")
        wanted = [self._common["commit"], self._common["label"], key, scenario, contender, pair]
        for row in reversed(self._all):
            if [row[name] for name in names] == wanted and "not_run" not in row:
                return row if self._folder is None or self._place(row).exists() else None
        return None

    def add(self, row: Mapping[str, Any], times: TokenTimes | None = None) -> Row:
        """Adds ``row`` (with key, scenario, contender and pair); returns the full row."""
        whole = {**row, **self._common}
        self._all.append(whole)
        if self._folder is not None and times is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._place(whole).write_text(json.dumps(times.requests) + "\n", encoding="utf-8")
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(whole) + "\n")
        return whole

    def times(self, row: Mapping[str, Any]) -> TokenTimes | None:
        """Returns the token times of a run; None if the times are not kept."""
        if self._folder is None or not self._place(row).exists():
            return None
        kept = json.loads(self._place(row).read_text(encoding="utf-8"))
        return TokenTimes(tuple((sent, tuple(times)) for sent, times in kept))

    def _place(self, row: Mapping[str, Any]) -> Path:
        assert self._folder is not None
        name = "-".join(
            str(row[part]).replace("/", "_")
            for part in ("label", "scenario", "contender", "pair", "key")
        )
        return self._folder / f"{name}.json"

    def tidy(self, rows: Sequence[Row]) -> list[Row]:
        """Removes outdated rows from the file; returns the remaining rows outside ``rows``."""
        self._all = latest(self._all)
        if self._path is not None:
            fresh = self._path.with_name(self._path.name + ".new")
            fresh.write_text("".join(json.dumps(r) + "\n" for r in self._all), encoding="utf-8")
            fresh.replace(self._path)
        mine = {_name(row) for row in rows}
        return [row for row in self._all if _name(row) not in mine]


def read(path: Path) -> list[Row]:
    """Returns the rows of a file; empty if the file does not exist.

    Raises ValueError with file and line for a malformed row.
    """
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            missing = {"key", "commit", "label", "contender", "scenario", "pair"} - set(row)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: line {number} is no row: {error}") from error
        if missing:
            raise ValueError(f"{path}: line {number} is no row: {', '.join(sorted(missing))}?")
        rows.append(row)
    return rows


def latest(rows: Sequence[Row]) -> list[Row]:
    """Returns, for each label, scenario and contender, the rows of the latest key and commit."""
    last = {_about(row): (row["key"], row["commit"]) for row in rows}
    kept = {_name(row): row for row in rows if last[_about(row)] == (row["key"], row["commit"])}
    return list(kept.values())


def _about(row: Row) -> tuple[str, str, str]:
    return row["label"], row["scenario"], row["contender"]


def _name(row: Row) -> tuple[str, str, str, int]:
    return (*_about(row), row["pair"])
